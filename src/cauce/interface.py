"""Cauce from Python: `Trainer` for a whole run, `Actor`, `Learner` and `Buffer` for those who write their own loop.

A `Trainer` starts Ray, rollout actors, a learner and reward workers from a recipe; rows and rewards may be Python
objects. An `Actor` is one engine and a `Learner` one set of trainable weights, as plain objects of this process (or of
another: `ray.remote(cauce.Actor)`). An actor takes no reward: scoring is its caller's, so a reward never runs inside
an engine.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cauce.algorithms.advantages import carries_signal, make_batch, train_sequences
from cauce.algorithms.table import resolve
from cauce.engine.native import NativeEngine
from cauce.environments.single_turn import SingleTurn
from cauce.errors import DataError
from cauce.learner.learner import Learner as CoreLearner
from cauce.metrics.live import make_view
from cauce.metrics.observer import Observer, Observers
from cauce.models.load import load_model, resolve_dtype
from cauce.recipe.load import load_recipe
from cauce.recipe.models import AlgorithmSettings, DataSettings, LearnerSettings
from cauce.report.observer import ReportObserver
from cauce.stages import rl
from cauce.types import Completion, GenerationRequest, Group, Outcome, Prompt, Row, Sample, Sampling

Reward = Callable[..., Any]


class Trainer:
    """A run from Python.

    Example:
        trainer = Trainer(model="SmolLM2-135M-Instruct", data=rows, reward=score, settings={"run.plans": 10})
        summary = trainer.train()

    Args:
        model: folder, pulled name or hub id.
        data: rows as dicts, or what `data.train` takes.
        reward: a function, lambda or instance in one of the conventions that rewards/adapters.py knows, or several.
        test: held-out rows for evaluation, likewise.
        recipe: a packaged recipe or a TOML file to start from.
        settings: "section.key" -> value, on top of the recipe.
    """

    def __init__(
        self,
        *,
        model: str,
        data: str | Iterable[Mapping[str, Any]],
        reward: str | Reward | Sequence[Reward],
        test: str | Iterable[Mapping[str, Any]] | None = None,
        recipe: str = "grpo",
        settings: Mapping[str, Any] | None = None,
        observer: Observer | None = None,
    ) -> None:
        pairs = {"model.path": model, **(settings or {})}
        given = []
        for key, value in (("data.train", data), ("data.test", test), ("reward.fn", reward)):
            if isinstance(value, str):
                pairs[key] = value
            elif value is not None:
                given.append(key)
        self.recipe = load_recipe(recipe, [f"{key}={_toml(value)}" for key, value in pairs.items()], given=given)
        self._rows = None if isinstance(data, str) else list(data)
        self._test = None if isinstance(test, str) or test is None else list(test)
        self._reward = None if isinstance(reward, str) else reward
        self._observer = observer

    def train(self) -> dict[str, Any]:
        """Runs to the end and returns what summary.json holds. Each call is a run of its own."""
        return rl.train(
            self.recipe,
            rows=self._rows,
            test_rows=self._test,
            reward=self._reward,
            observer=Observers([ReportObserver(), self._observer or make_view(live=self.recipe.logging.live)]),
        )

    @staticmethod
    def resume(
        run: str | Path,
        *,
        reward: Reward | Sequence[Reward] | None = None,
        data: Iterable[Mapping[str, Any]] | None = None,
        test: Iterable[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        observer: Observer | None = None,
        takeover: bool = False,
    ) -> dict[str, Any]:
        """Goes on with a run that stopped, or with `takeover` takes it from an owner that is cut off.

        A reward that is a Python object must be given again; rows are kept in the run folder, where JSON can hold them.
        """
        return rl.resume(
            run,
            overrides=[f"{key}={_toml(value)}" for key, value in (settings or {}).items()],
            rows=None if data is None else list(data),
            test_rows=None if test is None else list(test),
            reward=reward,
            observer=Observers([ReportObserver(), observer or make_view()]),
            takeover=takeover,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The answers of an actor to one prompt."""

    prompt: Prompt
    prompt_ids: np.ndarray  # int32 [P]
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]

    def score(self, rewards: Sequence[float | None]) -> Group:
        """The rollout with one number per answer; None leaves an answer out of statistics and loss."""
        samples = tuple(
            Sample(
                completion=completion,
                outcome=Outcome(
                    status="abstained" if value is None else "scored",
                    value=None if value is None else float(value),
                    parts={},
                    detail="",
                ),
            )
            for completion, value in zip(self.completions, rewards, strict=True)
        )
        return Group(task=self.completions[0].task, prompt_ids=self.prompt_ids, samples=samples)


class Actor:
    """One engine: generates answers, takes new weights, says how it is.

    Args:
        model: folder, pulled name or hub id.
        dtype: "auto", "fp32" or "bf16".
        slots: answers generated at the same time.
    """

    def __init__(self, model: str, *, dtype: str = "auto", slots: int = 64, seed: int = 0) -> None:
        loaded = load_model(model, dtype=resolve_dtype(dtype), attention="sdpa")
        self._engine = NativeEngine(loaded, slots=slots)
        self._environment = SingleTurn(loaded.tokenizer, DataSettings())
        self._eos = loaded.eos_token_ids
        self._seed = seed
        self._num_tasks = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
    ) -> list[Rollout]:
        """`num` answers to each prompt, with the exact log-probability of every sampled token.

        Raises:
            DataError: for an empty list of prompts.
        """
        if not prompts:
            raise DataError("generate needs at least one prompt")
        stops = self._environment.stop_token_ids(list(stop), eos_token_ids=self._eos)
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, stop_token_ids=stops, seed=self._seed)
        first = self._num_tasks
        self._num_tasks += len(prompts)
        rows = [Row(id=f"prompt:{first + i}", prompt=prompt, columns={}) for i, prompt in enumerate(prompts)]
        requests = [
            GenerationRequest(
                task=first + i,
                attempt=0,
                indices=tuple(range(num)),
                prompt_ids=self._environment.render(row).token_ids,
                sampling=sampling,
            )
            for i, row in enumerate(rows)
        ]
        done = self._engine.generate(requests)
        return [
            self._rollout(row.prompt, request, done[i * num : (i + 1) * num])
            for i, (row, request) in enumerate(zip(rows, requests, strict=True))
        ]

    def load_state(self, state: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Takes a learner's weights; every token sampled from now on carries `version`."""
        self._engine.load_state(state, version=version, lineage="0")

    def status(self) -> dict[str, Any]:
        """Version, load, memory, and where the seconds went."""
        return dict(self._engine.status())

    def _rollout(self, prompt: Prompt, request: GenerationRequest, done: Sequence[Completion]) -> Rollout:
        texts = tuple(self._environment.answer_text(c.token_ids, request.sampling.stop_token_ids) for c in done)
        return Rollout(prompt=prompt, prompt_ids=request.prompt_ids, completions=tuple(done), texts=texts)


class Learner:
    """Trainable weights and the algorithm that moves them.

    Args:
        model: folder, pulled name or hub id.
        algorithm: grpo, dr_grpo, dapo or rloo.
        total_steps: updates over which `schedule` runs.
        settings: keys of the recipe's [learner] section, such as lr=1e-5.
    """

    def __init__(
        self,
        model: str,
        *,
        algorithm: str = "grpo",
        temperature: float = 1.0,
        max_tokens: int = 256,
        total_steps: int = 1000,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        loaded = load_model(model, dtype=torch.float32, attention="sdpa")
        self._algorithm = resolve(AlgorithmSettings(name=algorithm), max_tokens=max_tokens, correction_needed=True)
        self._learner = CoreLearner(
            loaded,
            algorithm=self._algorithm,
            settings=LearnerSettings(**(settings or {})),
            temperature=temperature,
            total_steps=total_steps,
        )
        self.version = 0

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimizer step on scored groups; the weights after it are version + 1."""
        sequences = train_sequences(self._algorithm, self._learner.score(groups, proximal=False))
        batch = make_batch(sequences)
        if batch.num_tokens == 0:
            raise DataError(f"none of the {len(groups)} groups has two scored answers, so there is nothing to train on")
        metrics = self._learner.forward_backward(batch) | self._learner.optim_step()
        self.version += 0 if metrics["optim/skipped"] else 1
        return metrics | {"has_signal": float(carries_signal(self._algorithm, groups))}

    def state(self, dtype: str = "fp32") -> dict[str, torch.Tensor]:
        """The weights by name, for `Actor.load_state`."""
        return self._learner.weights(resolve_dtype(dtype))

    def status(self) -> dict[str, Any]:
        """Version, steps, device, dtypes, threads."""
        return dict(self._learner.status()) | {"version": self.version}


def _toml(value: Any) -> str:
    """A Python value as the text of a TOML value; NumPy's scalars count as numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    # JSON's escapes are TOML's, but for DEL, which JSON leaves alone.
    return json.dumps(str(value)).replace("\x7f", "\\u007f")
