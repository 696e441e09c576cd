"""Ratios as horizontal bars on a logarithmic axis, as SVG: 1 is even with the other side, a tick is the target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, ROW, TOP, LEFT, RIGHT, BOTTOM = 720, 30, 50, 250, 64, 30
AXIS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2937}.grid{stroke:#e5e7eb}.even{stroke:#6b7280}"
    ".ahead{fill:#2563eb}.behind{fill:#fdba74}.target{stroke:#c2410c;stroke-width:2}.spread{stroke:#1f2937}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One ratio, its smallest and largest measurement, and what it is to be."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    target: float | None = None


def bars(rows: Sequence[Bar], *, title: str) -> str:
    """The bars from top to bottom; each goes from 1 to its value."""
    if not rows:
        raise ValueError("a chart of bars needs at least 1")
    numbers = [number for row in rows for number in (row.value, row.low, row.high, row.target) if number]
    axis = axis_of(min(numbers), max(numbers))
    height = TOP + ROW * len(rows) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22">{escape(title)}</text>',
        f'<line class="target" x1="{LEFT}" x2="{LEFT}" y1="31" y2="43"/><text x="{LEFT + 8}" y="41">target</text>',
        f'<line class="spread" x1="{LEFT + 70}" x2="{LEFT + 90}" y1="37" y2="37"/>'
        f'<text x="{LEFT + 96}" y="41">smallest to largest of the measurements</text>',
    ]
    for mark in axis:
        x = _x(mark, axis)
        look = "even" if mark == 1 else "grid"
        parts.append(f'<line class="{look}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{mark:g}x</text>')
    for number, row in enumerate(rows):
        parts += _bar(row, TOP + ROW * number, axis)
    return "\n".join([*parts, "</svg>"]) + "\n"


def axis_of(low: float, high: float) -> tuple[float, ...]:
    """The marks from the last one at or below both `low` and 1 to the first one at or above both `high` and 1."""
    first = max((mark for mark in AXIS if mark <= min(low, 1.0)), default=AXIS[0])
    last = min((mark for mark in AXIS if mark >= max(high, 1.0)), default=AXIS[-1])
    return tuple(mark for mark in AXIS if first <= mark <= max(last, 2.0))


def _bar(row: Bar, y: int, axis: Sequence[float]) -> list[str]:
    start, end = sorted((_x(1.0, axis), _x(row.value, axis)))
    middle = y + ROW / 2
    look = "ahead" if row.value >= 1 else "behind"
    outer = max(end, *(_x(number, axis) for number in (row.high, row.target) if number), end)
    parts = [
        f'<text x="{LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.label)}</text>',
        f'<rect class="{look}" x="{start:.1f}" y="{y + 7}" width="{end - start:.1f}" height="{ROW - 14}"/>',
        f'<text x="{outer + 6:.1f}" y="{middle + 4:.1f}">{row.value:.3g}x</text>',
    ]
    if row.low and row.high:
        low, high = _x(row.low, axis), _x(row.high, axis)
        parts.append(f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
    if row.target:
        x = _x(row.target, axis)
        parts.append(f'<line class="target" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 3}" y2="{y + ROW - 3}"/>')
    return parts


def _x(value: float, axis: Sequence[float]) -> float:
    share = math.log(value / axis[0]) / math.log(axis[-1] / axis[0])
    return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, share))
