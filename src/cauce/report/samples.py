"""What the report shows of the journal: some whole groups from plans across the run, rewards, and events.

Groups are taken evenly from first to last plan, in plan order, never by how they look. Reading works beside a
running owner. Token texts are pieces of the answer's own decoding, so that joined they are exactly it.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce.errors import CauceError, JournalError
from cauce.journal.queries import EventRecord, JournalReader, PlanRecord
from cauce.types import Group, Sample

logger = logging.getLogger(__name__)

MAX_PLANS = 12  # from so many plans samples are shown
MAX_TOKENS = 60_000  # of all samples together; long answers mean fewer of them
Decode = Callable[[list[int]], str]
HALF_CHARACTER = "\ufffd"  # how a decoder writes bytes that are no whole character yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSample:
    """One trained answer, ready to be shown. `tokens` joined are its text; `reward` may be None."""

    plan: int
    task: int
    index: int
    prompt_text: str
    tokens: list[str]
    logps: list[float]
    reward: float | None
    status: str
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalView:
    """What the report takes from a journal. `num_unkept` counts groups whose payloads are no longer kept."""

    samples: list[ReportSample]
    first_rewards: dict[int, list[float]]  # by plan, of the first tenth of the plans and at most 12
    last_rewards: dict[int, list[float]]  # of as many last plans; empty where a run has one plan
    events: list[EventRecord]
    meta: Mapping[str, str]
    num_unkept: int


def load_samples(run_dir: Path, limit: int) -> list[ReportSample]:
    """At most `limit` samples of the run, whole groups where they fit."""
    view = load_journal(run_dir, limit)
    return view.samples if view else []


def load_journal(run_dir: Path, limit: int) -> JournalView | None:
    """Samples, rewards and events; None where the folder has no journal."""
    from cauce.journal.store import Journal

    if not (run_dir / "journal.db").exists():
        return None
    with Journal.read_only(run_dir) as journal:
        plans = [record for record in journal.plans() if record.state != "planned"]
        tenth = min(max(1, len(plans) // 10), MAX_PLANS)
        groups = _GroupCache(journal)
        samples = _samples(spread(plans, MAX_PLANS), groups, limit, run_dir)
        return JournalView(
            samples=samples,
            first_rewards=groups.rewards(plans[:tenth]),
            last_rewards=groups.rewards(plans[tenth:][-tenth:]),
            events=journal.events(),
            meta=journal.meta,
            num_unkept=groups.num_unkept,
        )


def spread(items: Sequence[PlanRecord], count: int) -> list[PlanRecord]:
    """At most `count` items at even distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def token_texts(decode: Decode, token_ids: list[int]) -> list[str]:
    """The text that each token adds; one that ends inside a character adds none, the next completes it."""
    texts: list[str] = []
    start = done = 0  # decoding starts a little earlier, so that the decoder sees what precedes the new token
    for i in range(len(token_ids)):
        known = decode(token_ids[start:done])
        longer = decode(token_ids[start : i + 1])
        is_last = i + 1 == len(token_ids)
        # A character has at most 4 bytes: what is still broken after 4 tokens stays so and is shown.
        if longer.endswith(HALF_CHARACTER) and not is_last and i + 1 - done < 4:
            texts.append("")
            continue
        texts.append(longer[len(known) :])
        start, done = done, i + 1
    return texts


def decoder_of(run_dir: Path) -> Decode | None:
    """The run's tokenizer: from its model folder, else a checkpoint, else the model that it started from.

    A tokenizer.json is enough and quick; only where there is none is transformers asked.
    """
    folders = [run_dir / "model", *sorted((run_dir / "checkpoints").glob("plan_*"), reverse=True)]
    names = [str(folder) for folder in folders if (folder / "tokenizer_config.json").exists()]
    names += [name for name in [_model_path(run_dir)] if name]
    for name in names[:1]:
        if (file := Path(name) / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            core = Tokenizer.from_file(str(file))
            return lambda ids: str(core.decode(ids, skip_special_tokens=False))
        from cauce.models.load import load_tokenizer

        try:
            tokenizer = load_tokenizer(name)
        except (CauceError, OSError, ValueError) as error:
            # A report without texts is still a report; the page shows token ids instead.
            logger.warning("tokenizer of %s could not be loaded: %s", name, error)
            return None
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    return None


def _model_path(run_dir: Path) -> str:
    path = run_dir / "recipe.json"
    if not path.exists():
        return ""
    recipe: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return str((recipe.get("model") or {}).get("path", ""))


class _GroupCache:
    """Groups of plans, each read once; `num_unkept` counts those that cannot be read any more."""

    def __init__(self, journal: JournalReader) -> None:
        self._journal = journal
        self._groups: dict[int, Group | None] = {}

    @property
    def num_unkept(self) -> int:
        return sum(group is None for group in self._groups.values())

    def of(self, record: PlanRecord) -> Iterator[Group]:
        return (group for task in record.plan.tasks if (group := self._group(task)) is not None)

    def rewards(self, plans: Sequence[PlanRecord]) -> dict[int, list[float]]:
        found = {
            record.plan.number: [
                sample.outcome.value
                for group in self.of(record)
                for sample in group.samples
                if sample.outcome.value is not None
            ]
            for record in plans
        }
        return {plan: values for plan, values in found.items() if values}

    def _group(self, task: int) -> Group | None:
        if task not in self._groups:
            try:
                self._groups[task] = self._journal.group(task)
            except JournalError:  # journal.keep = "since_checkpoint" drops payloads of old plans
                self._groups[task] = None
        return self._groups[task]


def _samples(plans: Sequence[PlanRecord], groups: _GroupCache, limit: int, run_dir: Path) -> list[ReportSample]:
    firsts = [group.samples for record in plans if (group := next(groups.of(record), None)) is not None]
    if not firsts:
        return []
    mean_tokens = sum(sum(len(s.completion.token_ids) for s in first) / len(first) for first in firsts) / len(firsts)
    limit = min(limit, max(len(firsts), round(MAX_TOKENS / max(mean_tokens, 1))))
    share = max(1, limit // len(firsts))  # samples of one plan
    decode = decoder_of(run_dir)
    result: list[ReportSample] = []
    for record in plans:
        taken = 0
        for group in groups.of(record):
            if taken and taken + len(group.samples) > share:
                break
            prompt = _text(decode, group.prompt_ids.tolist())
            kept = group.samples[: share - taken]
            result += [_sample(record, group, sample, prompt, decode) for sample in kept]
            taken += len(kept)
    return result[:limit]


def _sample(record: PlanRecord, group: Group, sample: Sample, prompt: str, decode: Decode | None) -> ReportSample:
    ids = sample.completion.token_ids.tolist()
    return ReportSample(
        plan=record.plan.number,
        task=group.task,
        index=sample.completion.index,
        prompt_text=prompt,
        tokens=token_texts(decode, ids) if decode else [f"<{i}>" for i in ids],
        logps=[round(float(logp), 4) for logp in sample.completion.logps],
        reward=sample.outcome.value,
        status=sample.outcome.status,
        finish_reason=sample.completion.finish_reason,
    )


def _text(decode: Decode | None, ids: list[int]) -> str:
    return decode(ids) if decode else " ".join(f"<{i}>" for i in ids)
