"""A process that takes turns as the measured ones do, and writes down when it works.

python -m tests.benchmarks.scripted NAME DIARY NUM_STEPS BEHAVIOUR
"""

import sys
import time
from pathlib import Path

from benchmarks.turns import Turns


def main() -> None:
    turns = Turns.from_pipes()
    name, diary, num_steps, behaviour = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if behaviour == "rounds":
        turns.play({}, num_rounds=num_steps, one_round=lambda number: round_of(name, diary, number))
        return
    print("what a library prints on stdout must not reach the conductor")
    turns.tell("ready", {"prompts": "other" if behaviour == "other_prompts" else "same"})
    for step in range(num_steps):
        turns.wait()
        if behaviour == "dies":
            raise ArithmeticError("this player gives up")
        if behaviour == "sleeps":
            time.sleep(60)
        with diary.open("a") as file:
            file.write(f"{name} begins {step}\n")
            file.flush()
            time.sleep(0.02)
            file.write(f"{name} ends {step}\n")
        facts = {"seconds": step + 1.0, "reward": 0.5, "silent_groups": 0.25, "length": 3.0}
        turns.tell("step", facts | ({"split": {"learn": float(step)}} if name == "cauce" else {}))
    turns.wait()
    turns.tell("end", {"status": "finished"})


def round_of(name: str, diary: Path, number: int) -> dict[str, float]:
    with diary.open("a") as file:
        file.write(f"{name} {number}\n")
    return {"seconds": number + 1.0, "rate": 10.0 * (number + 1)}


if __name__ == "__main__":
    main()
