"""One slice of generation: its tokens and engine steps, and, for a timeline, where the time went."""

from typing import Any

from cauce import spans
from cauce.types import Completion


class Slice:
    """Counts between its making and `finish`; recorded as spans `generate`, and in it `prefill` and `decode`.

    A step of the engine admits what fits (prefill) and then draws a token for every live sample (decode). Steps
    without a prefill that follow each other are one `decode` span, with the seconds of its parts.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._traced = spans.listener() is not None
        self._before = engine.status()
        self._began = self._run_began = spans.now()
        self._at_run = self._before  # the engine when the run of decode steps began
        self.num_tokens = self.num_steps = 0

    def step(self) -> list[Completion]:
        if not self._traced:
            return list(self._engine.step())
        began, before = spans.now(), self._engine.status()
        done = list(self._engine.step())
        prefill_s = self._engine.status()["seconds"]["prefill"] - before["seconds"]["prefill"]
        if prefill_s > 0:
            self._end_run(began, before)
            spans.record("prefill", began, began + prefill_s)
            self._run_began = began + prefill_s
        return done

    def finish(self, *, answers: int) -> None:
        """To be called once, when the last step is done."""
        after = self._engine.status()
        self.num_tokens = int(after["sampled_tokens"]) - int(self._before["sampled_tokens"])
        self.num_steps = int(after["steps"]) - int(self._before["steps"])
        if not self._traced or not self.num_steps:
            return
        now = spans.now()
        self._end_run(now, after)
        spans.record(
            "generate",
            self._began,
            now,
            tokens=self.num_tokens,
            steps=self.num_steps,
            answers=answers,
            version=after["version"],
            live_at_end=after["live"],
            waiting_at_end=after["waiting"],
        )
        spans.count("slots", live=after["live"], waiting=after["waiting"])

    def _end_run(self, now: float, after: dict[str, Any]) -> None:
        """Records the run of decode steps up to `now`, when the engine's status was `after`."""
        before = self._at_run
        parts = {name: after["seconds"][name] - before["seconds"][name] for name in ("decode", "sample", "other")}
        if parts["decode"] > 0:
            split = {f"{name}_s": round(seconds, 4) for name, seconds in parts.items()}
            tokens = int(after["sampled_tokens"]) - int(before["sampled_tokens"])
            spans.record("decode", self._run_began, now, tokens=tokens, live=after["live"], **split)
        self._at_run = after
