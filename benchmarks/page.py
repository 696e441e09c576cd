"""docs/performance.md from results.json: `python -m benchmarks.page` writes the parts between its markers anew.

The text around the markers holds no figure, so that it stays right when something is measured again. The pictures
beside the page are drawn from the same file. A test compares page and pictures with what this module makes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, bars
from benchmarks.heat_map import Panel, heat_map
from benchmarks.results import RESULTS, read

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "performance.md"
MARKER = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
Entries = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What the page says of a name in results.json."""

    title: str
    target: float | None = None  # of the ratio
    limits: tuple[str, ...] = ()  # names whose ratio says how far we are from what the machine can do


FIGURES = {
    "grpo_step_vs_trl": Figure(
        title="One GRPO step, against TRL", target=12, limits=("decode_vs_gemm", "learner_vs_gemm")
    ),
    "time_to_accuracy_vs_trl": Figure(
        title="Training to accuracy 0.6, against TRL", target=12, limits=("decode_vs_gemm", "learner_vs_gemm")
    ),
    "generate_vs_transformers": Figure(title="Generation, against transformers", target=4, limits=("decode_vs_gemm",)),
    "generate_vs_vllm": Figure(title="Generation, against vLLM", target=1.25, limits=("decode_vs_gemm",)),
    "learner_vs_padded": Figure(title="Learner, against padded rows", target=5, limits=("learner_vs_gemm",)),
    "learner_long": Figure(title="Learner, prompts of 1,000", limits=("learner_vs_gemm",)),
    "learner_surface": Figure(title="Learner, at its worst cell", limits=("learner_vs_gemm",)),
    "learner_vs_gemm": Figure(title="Learner, against bare products", target=0.7, limits=("learner_vs_gemm",)),
    "decode_vs_gemm": Figure(title="Decoding, against bare products", target=0.6, limits=("decode_vs_gemm",)),
    "weights_vs_copy": Figure(title="Weights, against bare copies", target=0.5, limits=("weights_vs_copy",)),
    "control_plane_1000": Figure(
        title="Control of 1,000 actors, of their rate", target=0.95, limits=("control_plane_1000",)
    ),
    "grpo_step_vs_trl_bf16": Figure(title="One GRPO step, both in bf16"),
    "grpo_step_vs_trl_fp32": Figure(title="One GRPO step, both in fp32"),
    "grpo_step_vs_trl_all_signal": Figure(title="One GRPO step, all groups with signal"),
}
LIMITS = {
    "decode_vs_gemm": "decode",
    "learner_vs_gemm": "learner",
    "weights_vs_copy": "copies",
    "control_plane_1000": "rate",
}


def table(entries: Entries) -> str:
    """The figures with a ratio that this page explains, and which of them are not measured yet."""
    lines = [
        "| figure | ours | the other side | ratio (smallest to largest) | target | share of the limit | dtype |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, figure in FIGURES.items():
        if name not in entries:
            continue
        entry = entries[name]
        cells = [
            f"{figure.title} (`{name}`)",
            f"{entry['ours']:.3g} {entry['unit']}",
            f"{entry['peer']:.3g}, {entry['peer_is']}",
            _ratio_text(entry),
            f"{figure.target:g}x" if figure.target else "",
            ", ".join(_limit_text(limit, entries) for limit in figure.limits if limit in entries),
            entry["dtype"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    missing = [f"`{name}`" for name in FIGURES if name not in entries]
    text = "\n".join(lines) + "\n"
    return text + (f"\nNot measured yet: {', '.join(missing)}.\n" if missing else "")


def others(entries: Entries) -> str:
    """What else is in results.json, by name."""
    lines = ["| name | ours | bound or other side |", "| --- | --- | --- |"]
    for name in sorted(entries.keys() - FIGURES.keys()):
        entry = entries[name]
        other = "" if entry["peer"] is None else f"{entry['peer']:.3g}, {entry['peer_is']}"
        lines.append(f"| `{name}` | {entry['ours']:.3g} {entry['unit']} | {other} |")
    return "\n".join(lines) + "\n"


def settings(entries: Entries) -> str:
    """What each other side was given, and what was tried before."""
    lines = []
    for name in FIGURES:
        if name not in entries:
            continue
        entry = entries[name]
        given = entry["settings"]
        lines.append(f"- `{name}` ({entry['peer_is']}): {_flat(given.get('peer', given))}.")
        for key, tried in given.items():
            if "_tried" in key:
                lines.append(f"  - {key.replace('_', ' ')}: {_flat(tried)}.")
    return "\n".join(lines) + "\n"


def long_prompts(entries: Entries) -> str:
    """Rates and peaks of the learner from short prompts to long ones."""
    if "learner_long" not in entries:
        return "Not measured yet.\n"
    detail = entries["learner_long"]["detail"]
    lines = [
        "| prompt / answer / answers | useful tokens/s | peak memory | padded rows: tokens/s | peak memory | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, rate in detail["ours"]["rate"].items():
        cells = [label, f"{rate:.3g}", f"{detail['ours']['peak_mb'][label] / 1024:.2f} GiB"]
        if label in detail["ratio"]:
            peer = detail["peer"]
            cells += [f"{peer['rate'][label]:.3g}", f"{peer['peak_mb'][label] / 1024:.2f} GiB"]
            cells += [f"{detail['ratio'][label]:.3g}x"]
        lines.append(f"| {' | '.join(cells + ['not run'] * (6 - len(cells)))} |")
    return "\n".join(lines) + "\n"


def machine(entries: Entries) -> str:
    """Where and when the figures were measured: each machine once, with the days."""
    places: dict[str, set[str]] = {}
    for name in FIGURES:
        if name in entries:
            place = entries[name]["machine"]
            text = (
                f"{place['cpus']} x {place['cpu']} ({', '.join(place['instructions'])}), {place['memory_gb']} GB, "
                f"Python {place['python']}, torch {place['torch']}, transformers {place['transformers']}"
            )
            places.setdefault(text, set()).add(entries[name]["measured"])
    return "".join(f"- {place}; {_span(days)}\n" for place, days in places.items())


def surface_picture(entries: Entries) -> str:
    """The picture's place on the page."""
    if "learner_surface" not in entries:
        return "The surface is not measured yet.\n"
    return "![Learner over lengths and group sizes](assets/learner_surface.svg)\n"


PARTS = {
    "table": table,
    "surface": surface_picture,
    "long": long_prompts,
    "others": others,
    "settings": settings,
    "machine": machine,
}


def rendered(text: str, entries: Entries) -> str:
    """The page with all its parts made anew; a marker of an unknown part is an error."""

    def replace(match: re.Match[str]) -> str:
        part = match.group(1)
        if part not in PARTS:
            raise ValueError(f"the page asks for a part {part!r}; there are {', '.join(PARTS)}")
        return f"<!-- generated: {part} -->\n{PARTS[part](entries)}<!-- end -->"

    return MARKER.sub(replace, text)


def pictures(entries: Entries) -> dict[str, str]:
    """The pictures by file name; one that nothing was measured for is left out."""
    made = {}
    rows = [
        Bar(
            label=figure.title,
            value=entries[name]["ratio"],
            low=_spread(entries[name])[0],
            high=_spread(entries[name])[1],
            target=figure.target,
        )
        for name, figure in FIGURES.items()
        if name in entries and entries[name]["ratio"]
    ]
    if rows:
        made["ratios.svg"] = bars(rows, title="How many times better than the other side")
    if "learner_surface" in entries:
        made["learner_surface.svg"] = surface(entries["learner_surface"]["detail"]["ratio"])
    return made


def surface(ratios: Mapping[str, float]) -> str:
    """One panel per group size: prompts from left to right, answers from bottom to top."""
    value = {tuple(int(part) for part in label.split("/")): ratio for label, ratio in ratios.items()}
    prompts, answers, groups = (sorted({key[axis] for key in value}) for axis in range(3))
    panels = [
        Panel(
            title=f"{size} answer{'s' if size > 1 else ''} to a prompt",
            rows=tuple(str(answer) for answer in answers),
            columns=tuple(str(prompt) for prompt in prompts),
            values=tuple(tuple(value.get((prompt, answer, size)) for prompt in prompts) for answer in answers),
        )
        for size in groups
    ]
    return heat_map(
        panels,
        title="Learner: packed against padded rows, useful tokens a second",
        x_name="prompt tokens",
        y_name="mean answer tokens",
    )


def write(entries: Entries) -> None:
    """Page and pictures, where something changed."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), entries), encoding="utf-8")
    for name, text in pictures(entries).items():
        (DOCS / "assets" / name).write_text(text, encoding="utf-8")


def _span(days: set[str]) -> str:
    return min(days) if len(days) == 1 else f"{min(days)} to {max(days)}"


def _ratio_text(entry: Mapping[str, Any]) -> str:
    low, high = _spread(entry)
    return f"**{entry['ratio']:.3g}x**" + (f" ({low:.3g} to {high:.3g})" if low is not None else "")


def _spread(entry: Mapping[str, Any]) -> tuple[float | None, float | None]:
    low, high = entry["spread"].get("ratio", (None, None))
    return low, high


def _limit_text(name: str, entries: Entries) -> str:
    return f"{LIMITS[name]} {100 * entries[name]['ratio']:.0f} %"


def _flat(value: Any) -> str:
    """Nested settings as one line."""
    if isinstance(value, Mapping):
        return "; ".join(f"{str(key).replace('_', ' ')}: {_flat(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    write(read(RESULTS))
