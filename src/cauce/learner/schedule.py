"""The learning rate as a pure function of the number of optimizer steps taken.

Plans, micro-batches and epochs do not enter: a schedule that counts anything but optimizer steps decays too fast or
too slowly as soon as a plan has several mini-batches. A skipped step (non-finite numbers) is not counted.
"""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, lr: float, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """The rate of the step that follows `step` steps already taken.

    warmup:   lr * (step + 1) / warmup_steps          while step < warmup_steps; its last step reaches lr
    linear:   lr * (1 - t)                            t = (step - warmup_steps) / (total_steps - warmup_steps)
    cosine:   lr * (1 + cos(pi t)) / 2
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return lr * (1 - progress)
    return lr * (1 + math.cos(math.pi * progress)) / 2
