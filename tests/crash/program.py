"""python -m tests.crash.program MODEL RUN: trains a tiny model on a Ray of its own, or goes on with the run."""

import sys
from pathlib import Path

from tests.crash.lives import ROWS, SHAPE
from tests.local_session import resume_locally, train_locally

if __name__ == "__main__":
    model, run = sys.argv[1], Path(sys.argv[2])
    if (run / "journal.db").exists():
        resume_locally(run, rows=ROWS)
    else:
        train_locally(model, run, cluster__dashboard=False, **SHAPE)
