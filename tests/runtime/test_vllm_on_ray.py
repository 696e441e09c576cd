"""The quickstart with vLLM as its engine, on Ray: actors in vLLM's interpreter, the rest in this one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cauce.engine.vllm_python import find_vllm_python
from cauce.journal import Journal
from cauce.recipe import load_recipe
from cauce.stages import rl
from cauce.stages.prepare import TOLERANCE

pytestmark = pytest.mark.vllm


def digits(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within almost every group, so that every plan trains."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(map(ord, text)) % 7 / 7 for text in texts]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_quickstart_trains_with_vllm(tmp_path: Path, max_staleness: int) -> None:
    python = find_vllm_python("").python
    settings = {
        "run.plans": 3,
        "run.dir": tmp_path,
        "run.name": "run",
        "engine.backend": "vllm",
        "engine.python": python,
        "engine.compiled": "false",
        "buffer.max_staleness": max_staleness,
        "learner.lr": 1e-4,
        "eval.tasks": 8,
        "eval.every": 0,
        "logging.live": "false",
        "logging.trace": "true",
        "logging.tensorboard": "false",
    }
    recipe = load_recipe("quickstart", [f"{key}={value}" for key, value in settings.items()])
    summary = rl.train(recipe, reward=digits)
    assert summary["status"] == "finished"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    plans = {row["plan"]: row for row in rows if row["plan"] > 0}
    assert sorted(plans) == [1, 2, 3]
    limit = max(TOLERANCE.values())  # bf16's; a stale sample differs by what was learned since as well
    checked = plans.values() if max_staleness == 0 else [plans[1]]
    assert all(0 < plan["sampler/log_ratio_abs_mean"] < limit for plan in checked)
    assert plans[1]["optim/grad_norm"] > 0
    with Journal.read_only(tmp_path / "run") as journal:
        records = list(journal.plans())
        assert [record.plan.number for record in records] == [1, 2, 3]
        assert all(record.checksum for record in records)
        counts = journal.counts()
        assert counts["trained"] == 3 * 16
        for record in records:
            for task in record.plan.tasks:
                answers = list(journal.answers(task))
                assert len(answers) == 4
                versions = np.concatenate([answer.versions for answer in answers])
                newest = record.plan.number - 1
                assert versions.min() >= newest - max_staleness
                assert versions.max() <= newest
                assert all(len(a.token_ids) == len(a.logps) and (a.logps <= 0).all() for a in answers)
