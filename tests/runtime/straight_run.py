"""A run that never stops, for others to be compared with, and the moments at which those are killed."""

from pathlib import Path

import pytest

from tests.local_session import (
    Killed,
    LocalSession,
    Watcher,
    dying,
    train_locally,
)

ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(4)]  # an epoch is two plans
SHAPE = {"rows": ROWS, "checkpoint__every": 2}
PLANS = 4

# Who dies at which call, before or after its work, and the newest plan that is decided by then.
KILLS = {
    "generated, not recorded": ("rollout", "work", 2, True),
    "answers recorded, not scored": ("reward_worker", "score", 3, False),
    "planned, not begun": ("learner", "score", 2, False),
    "between gradient and step": ("learner", "optim_step", 3, False),
    "trained, not applied": ("learner", "checksum", 2, True),
    "published, not checkpointed": ("learner", "publish", 3, True),
    "checkpoint on disk, not recorded": ("learner", "save_checkpoint", 1, True),
}


def told(watcher: Watcher, text: str) -> bool:
    return any(text in note for note in watcher.notes)


def killed_run(local: type[LocalSession], straight: Path, run: Path, kill: str) -> None:
    role, method, call, after = KILLS[kill]
    healthy = getattr(local, role)
    setattr(local, role, dying(healthy, method, call=call, after=after))
    with pytest.raises(Killed):
        train_locally(straight.parent / "model", run, run__plans=PLANS, **SHAPE)
    setattr(local, role, healthy)
