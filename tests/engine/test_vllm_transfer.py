"""The part of the weight transfer that needs no vLLM: what is read, checked and given to a model that fuses."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cauce.engine.vllm_engine import cache_bytes, sample_seed
from cauce.engine.vllm_transfer import Received, expected_shapes, packed_products, receive, repack
from cauce.errors import VersionGoneError, WeightsError
from cauce.models.load import load_model, parameter_names
from cauce.weights.store import WeightStore
from tests.tiny import KINDS, tiny_model

SHAPES = {name: torch.Size((2, 3)) for name in ("q.weight", "k.weight", "out.weight")}


class Fusing(nn.Module):
    """Two of three tensors end in one parameter, as queries and keys do in vLLM."""

    def __init__(self, *, ignores: str = "", skips: str = "") -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(4, 3))
        self.out = nn.Parameter(torch.zeros(2, 3))
        self.ignores, self.skips = ignores, skips

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        reached = set()
        for name, tensor in weights:
            if name == self.ignores:
                continue
            target, part = {"q.weight": ("qk", slice(0, 2)), "k.weight": ("qk", slice(2, 4))}.get(
                name, ("out", slice(0, 2))
            )
            with torch.no_grad():
                getattr(self, target)[part].copy_(tensor)
            reached.add(target)
        return reached - {self.skips}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path, keep=9)
    whole = {name: torch.full(shape, float(i + 1)) for i, (name, shape) in enumerate(SHAPES.items())}
    store.publish(whole, version=4, lineage="b")
    store.publish({name: whole[name] for name in ("q.weight", "out.weight")}, version=5, lineage="b")
    store.publish({**whole, "k.weight": torch.zeros(3, 2)}, version=6, lineage="b")
    return store


def take(model: Fusing, store: WeightStore, version: int, begun: list[int]) -> Received:
    return receive(model, folder=store.folder, version=version, shapes=SHAPES, begin=lambda: begun.append(version))


def test_every_tensor_arrives_in_its_part_of_a_fused_parameter(store: WeightStore) -> None:
    model, begun = Fusing(), []
    assert take(model, store, 4, begun) == Received(version=4, lineage="b", checksum=store.pull(4).checksum)
    assert begun == [4]
    assert model.qk.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert model.out.tolist() == [[3.0] * 3] * 2


@pytest.mark.parametrize(("version", "says"), [(5, "1 are missing"), (6, r"k.weight is .*\(3, 2\)")])
def test_other_names_and_shapes_are_refused_before_the_model_is_touched(
    store: WeightStore, version: int, says: str
) -> None:
    model, begun = Fusing(), []
    with pytest.raises(WeightsError, match=says):
        take(model, store, version, begun)
    assert begun == []
    assert not model.qk.any()


def test_torn_content_and_a_version_that_is_gone(store: WeightStore) -> None:
    path = store.folder / "version_000004.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="torn or foreign"):
        take(Fusing(), store, 4, [])
    with pytest.raises(VersionGoneError, match="version 9"):
        take(Fusing(), store, 9, [])


def test_a_tensor_that_the_model_passes_over_is_an_error(store: WeightStore) -> None:
    with pytest.raises(WeightsError, match=r"Fusing takes no tensor 'k\.weight'"):
        take(Fusing(ignores="k.weight"), store, 4, [])


def test_a_parameter_that_nothing_reaches_is_an_error(store: WeightStore) -> None:
    class Extra(Fusing):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1))

    with pytest.raises(WeightsError, match=r"1 parameters of vLLM's Extra got nothing \(first: 'bias'\)"):
        take(Extra(), store, 4, [])


@pytest.mark.parametrize("kind", KINDS)
def test_expected_shapes_are_those_that_a_learner_publishes(kind: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / kind, kind)
    model = load_model(str(folder), dtype=torch.float32, attention="sdpa").model
    found = expected_shapes(str(folder))
    assert tuple(found) == parameter_names(model)
    assert all(shape == dict(model.named_parameters())[name].shape for name, shape in found.items())


def test_seeds_differ_by_run_task_and_index_and_fit_64_bits() -> None:
    seeds = {sample_seed(run, task, index) for run in (0, 1, -1) for task in range(20) for index in range(20)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_the_cache_holds_all_slots_within_a_limit_and_one_sample_at_least(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576, max_position_embeddings=1
    )
    token = 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, their width, bytes
    assert cache_bytes(config, itemsize=2, slots=4, longest=256) == 4 * 512 * token
    assert cache_bytes(config, itemsize=2, slots=1000, longest=8192) == 2**30
    assert cache_bytes(config, itemsize=2, slots=1000, longest=100_000) == 100_256 * token


class Packing(nn.Module):
    """A layer as on a CPU: its product reads a copy, made when the layer is processed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.quant_method = self
        self.process_weights_after_loading(self)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        copy = self.weight.clone()
        layer.cpu_linear = lambda x: x @ copy.T


def test_a_packed_copy_that_an_update_passed_over_is_made_anew() -> None:
    model = nn.Sequential(Packing(), Packing(), nn.Linear(2, 2))
    products = packed_products(model)
    assert set(products) == {model[0], model[1]}
    model[0].weight.fill_(3.0)
    model[1].weight.fill_(3.0)
    model[0].process_weights_after_loading(model[0])  # as vLLM does for all but a tied head
    by_vllm = model[0].cpu_linear
    repack(products)
    assert model[0].cpu_linear is by_vllm
    assert model[1].cpu_linear(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]


def test_a_packed_copy_that_stays_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Packing())
    products = packed_products(model)
    monkeypatch.setattr(Packing, "process_weights_after_loading", lambda self, layer: None)
    with pytest.raises(WeightsError, match="Packing goes on with a packed copy"):
        repack(products)
