"""What the learner is given is what the engine sampled: tokens, distribution and order, in whole runs without Ray."""

from pathlib import Path
from typing import Any

import pytest

from cauce.journal import Journal
from cauce.runtime.roles import LearnerWorker
from cauce.types import Batch
from tests.local_session import LocalSession, Watcher, train_locally


def listening(batches: list[Batch]) -> type[LearnerWorker]:
    class Listening(LearnerWorker):
        def forward_backward(self, *, batch: Batch) -> dict[str, float]:
            batches.append(batch)
            return super().forward_backward(batch=batch)

    return Listening


def test_the_tokens_of_the_loss_are_those_that_were_recorded_while_sampling(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """C12, B10: ids and log-probs, bit for bit; at this temperature the bytes are no valid text, so that decoding and
    encoding would show."""
    batches: list[Batch] = []
    local.learner = listening(batches)
    train_locally(tiny, tmp_path / "run", rollout__temperature=2.0, rollout__max_tokens=12)
    with Journal.read_only(tmp_path / "run") as journal:
        for record, batch in zip(journal.plans(), batches, strict=True):
            recorded = [(g.prompt_ids, s.completion) for g in map(journal.group, record.plan.tasks) for s in g.samples]
            assert len(recorded) == len(batch.sequences) == 8
            for (prompt_ids, completion), sequence in zip(recorded, batch.sequences, strict=True):
                assert sequence.prompt_ids.tobytes() == prompt_ids.tobytes()
                assert sequence.token_ids.tobytes() == completion.token_ids.tobytes()
                assert sequence.behaviour_logps.tobytes() == completion.logps.tobytes()
                assert sequence.mask.all()
            assert batch.num_tokens == sum(len(c.token_ids) for _, c in recorded)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_sampler_learner_and_reference_share_the_temperature(
    local: type[LocalSession], tiny: Path, tmp_path: Path, temperature: float, kl_coef: float
) -> None:
    """C1, C2: the first ratio is 1 and the first KL is 0, whatever the temperature."""
    watcher = Watcher()
    shape: dict[str, Any] = {"run__plans": 1, "rollout__temperature": temperature, "algorithm__kl_coef": kl_coef}
    train_locally(tiny, tmp_path / "run", observer=watcher, **shape)
    metrics = watcher.plans[1]
    assert metrics["sampler/log_ratio_abs_mean"] < 1e-5
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics.get("policy/kl_reference", 0.0) < 1e-6
