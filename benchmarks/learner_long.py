"""`learner_long`: useful tokens a second and peak memory as prompts grow to 2,000 tokens, 8 answers of half of that.

One group a step, so that a step is longer than the token budget from prompts of about 1,000 on. Padded rows go along in
turns as far as PEER_PROMPTS; at 2,000 they would compute 28,000 tokens with attention over rows of 3,500, as long as
everything else together. The figure is the longest cell that both play; ours goes on alone.
"""

from typing import Any

from benchmarks.bench import Bench
from benchmarks.learner_speed import play, settings_of, start, title
from benchmarks.learner_work import Cell, LearnerWork
from benchmarks.results import Result
from benchmarks.rounds import Facts, alone

PROMPTS = (250, 500, 1000, 2000)
PEER_PROMPTS = PROMPTS[:-1]
GROUP_SIZE = 8


def cell_of(prompt: int) -> Cell:
    return Cell(prompt=prompt, answer=prompt // 2, group_size=GROUP_SIZE, num_groups=1)


def learner_long(bench: Bench) -> dict[str, Result]:
    """Both sides from short to long, then ours alone."""
    return long_over(bench, prompts=PROMPTS, peer_prompts=PEER_PROMPTS)


def long_over(bench: Bench, *, prompts: tuple[int, ...], peer_prompts: tuple[int, ...]) -> dict[str, Result]:
    """The first cell is played once more, to warm up."""
    cells = [cell_of(prompt) for prompt in peer_prompts]
    ours, peer = play(bench, (cells[0], *cells), warm_up=1)
    longer = tuple(cell_of(prompt) for prompt in prompts[len(peer_prompts) :])
    work = LearnerWork(model=str(bench.model_folder.resolve()), dtype=bench.dtype, rounds=(cells[0], *longer))
    with start(bench, work, "ours") as player:
        ours += alone(player, num_rounds=len(work.rounds), warm_up=1)
    labels = [cell_of(prompt).label for prompt in prompts]
    return {
        "learner_long": Result(
            ours=ours[len(peer) - 1]["rate"],
            peer=peer[-1]["rate"],
            unit="useful tokens/s",
            dtype=bench.dtype,
            runs=1,
            better="higher",
            peer_is=title(),
            settings={
                **settings_of(bench),
                "cell": f"{labels[len(peer) - 1]}, the longest that both play",
                "groups": 1,
                "padded_rows_end_at": "a step beyond would take longer than the whole measurement",
                "peak_mb": "resident memory at its highest: ours with float32 weights and the optimizer's moments, "
                "padded rows with weights and gradients in the dtype of the forward alone",
            },
            detail={
                "ratio": _by(labels, [own["rate"] / other["rate"] for own, other in zip(ours, peer, strict=False)]),
                "ours": {name: _by(labels, _column(ours, name)) for name in ("rate", "peak_mb", "packed_tokens")},
                "peer": {name: _by(labels, _column(peer, name)) for name in ("rate", "peak_mb", "micro_batch")},
            },
        )
    }


def _column(rounds: list[Facts], name: str) -> list[Any]:
    return [facts[name] for facts in rounds]


def _by(labels: list[str], values: list[Any]) -> dict[str, Any]:
    """As far as there are values."""
    return dict(zip(labels, values, strict=False))
