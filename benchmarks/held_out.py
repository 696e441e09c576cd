"""The greedy evaluator of `time_to_accuracy_vs_trl`: the quickstart's held-out tasks under weights from a folder."""

from pathlib import Path

from safetensors.torch import load_file

from cauce.engine.native import NativeEngine
from cauce.models.load import load_model, resolve_dtype
from cauce.stages.prepare import Prepared
from cauce.types import GenerationRequest


class HeldOut:
    """The engine, sampling and reward that the run's own evaluation uses, with weights that come from outside."""

    def __init__(self, prepared: Prepared) -> None:
        assert prepared.source is not None
        self._prepared, self._source = prepared, prepared.source
        recipe = prepared.recipe
        model = load_model(prepared.model_path, dtype=resolve_dtype(recipe.engine.dtype), attention="sdpa")
        self._engine = NativeEngine(model, slots=recipe.engine.slots)
        self._names = [name for name, parameter in model.model.named_parameters() if parameter.requires_grad]
        self._tasks = [self._source.of_row(number, row) for number, row in enumerate(prepared.test_rows)]
        self._version = 0

    def accuracy(self, folder: Path) -> float:
        """Mean reward of greedy answers under the weights in `folder`."""
        tensors = load_file(folder / "model.safetensors")
        self._version += 1
        self._engine.load_state(
            {name: tensors[name] for name in self._names}, version=self._version, lineage="held out"
        )
        return self.of_now()

    def of_now(self) -> float:
        """The same under the weights that are loaded."""
        requests = [
            GenerationRequest(
                task=task.id,
                attempt=0,
                indices=(0,),
                prompt_ids=task.prompt_ids,
                sampling=self._prepared.eval_sampling,
            )
            for task in self._tasks
        ]
        answers = self._engine.generate(requests)
        assert self._prepared.reward is not None
        scored = self._prepared.reward.score(
            rows=[task.row for task in self._tasks],
            texts=[self._source.answer_text(answer.token_ids) for answer in answers],
            token_ids=[answer.token_ids.tolist() for answer in answers],
            step=0,
            max_steps=1,
        )
        values = [outcome.value for outcome in scored.outcomes if outcome.value is not None]
        return sum(values) / len(values)
