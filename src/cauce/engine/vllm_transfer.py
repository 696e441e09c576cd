"""vLLM's way to our weight store: a weight-transfer engine of ours, registered under the name "cauce".

vLLM drives it through `start_weight_update`, `update_weights` and `finish_weight_update`. An update names a folder and
a version; the engine reads the file itself, checks its content against the checksum in its header, and names and
shapes against those of the model, before anything of vLLM's model is touched. Then each tensor goes through the
model's own `load_weights`, which fuses queries, keys and values, and gate and up. A tensor that ends in no parameter
and a parameter that no tensor reaches are errors: the model would run half old, half new. So would a packed copy that
vLLM does not make anew; it makes none for a head that is tied to the embedding, so we do.

vLLM is imported inside functions: it lives in an environment of its own, and this file is read in both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cauce.engine.state import check_state
from cauce.errors import WeightsError
from cauce.weights.store import WeightStore

NAME = "cauce"


class TakesWeights(Protocol):
    """What of vLLM's models is used here."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]: ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What the model holds since the last update."""

    version: int
    lineage: str
    checksum: str


def expected_shapes(model_path: str) -> dict[str, torch.Size]:
    """Names and shapes that a learner of this model publishes, from its config alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


def receive(
    model: TakesWeights, *, folder: Path, version: int, shapes: Mapping[str, torch.Size], begin: Callable[[], None]
) -> Received:
    """Reads one version from the store, checks it, and gives it to the model.

    Args:
        begin: called once everything is known to be right, before the first tensor is given.

    Raises:
        VersionGoneError: where the store keeps that version no longer.
        WeightsError: for torn content, other names or shapes (the model is as it was), or where the model does not
            take all of it (then it is worthless).
    """
    published = WeightStore(folder, keep=1).pull(version)
    what = f"version {version} of lineage {published.lineage!r}"
    check_state(shapes, published.tensors, what)
    untouched = {name for name, parameter in model.named_parameters()}
    begin()
    for name, tensor in published.tensors.items():
        reached = model.load_weights([(name, tensor)])
        if not reached:
            raise WeightsError(f"weights {what}: vLLM's {type(model).__name__} takes no tensor {name!r}")
        untouched -= reached
    if untouched:
        raise WeightsError(
            f"weights {what}: {len(untouched)} parameters of vLLM's {type(model).__name__} got nothing "
            f"(first: {min(untouched)!r})"
        )
    return Received(version=version, lineage=published.lineage, checksum=published.checksum)


def packed_products(model: nn.Module) -> dict[nn.Module, Callable[..., Tensor]]:
    """On a CPU vLLM multiplies by packed copies of weights: the layers that have one, and the product that reads it."""
    products = {module: getattr(module, "cpu_linear", None) for module in model.modules()}
    return {
        module: product
        for module, product in products.items()
        if product is not None and product is not nn.functional.linear  # which reads the weight itself
    }


def repack(products: Mapping[nn.Module, Callable[..., Tensor]]) -> None:
    """Packs anew what an update has passed over: a head tied to the embedding, whose tensor comes under one name.

    Args:
        products: what `packed_products` found before the update.

    Raises:
        WeightsError: where a layer goes on with the copy of before.
    """
    for module, before in products.items():
        if module.cpu_linear is before:
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
        if module.cpu_linear is before:
            raise WeightsError(f"vLLM's {type(module).__name__} goes on with a packed copy of the weights of before")


def register() -> None:
    """Makes the engine known to vLLM under NAME, once per process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # type: ignore[import-not-found]

    if NAME not in WeightTransferEngineFactory._registry:  # it has no public question, and refuses a second time
        WeightTransferEngineFactory.register_engine(NAME, _engine_class())


def _engine_class() -> type:
    from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """Nothing has to be agreed on: a file is found by its name."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        folder: str
        version: int

    class StoreEngine(WeightTransferEngine):
        """Pulls from a weight store; each worker process of an engine reads for itself."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.shapes = expected_shapes(self.model_config.model)
            self.received: Received | None = None
            self.has_begun = False

        def init_transfer_engine(self, init_info: InitInfo) -> None: ...

        def start_weight_update(self) -> None:
            self.has_begun = False  # layers are opened in receive_weights, when the content is known to be right

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.received = receive(
                self.model,
                folder=Path(update_info.folder),
                version=update_info.version,
                shapes=self.shapes,
                begin=self._begin,
            )

        def _begin(self) -> None:
            self.has_begun = True
            self._products = packed_products(self.model)
            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            if self.has_begun:
                finalize_layerwise_reload(self.model, self.model_config)
                repack(self._products)

        def shutdown(self) -> None: ...

    return StoreEngine
