"""Tables of ratios as SVG: one panel beside another, each cell with its number on a colour that follows it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

CELL_W, CELL_H = 58, 34
LEFT, TOP, GAP, BOTTOM = 56, 78, 26, 46
STYLE = "text{font:13px system-ui,sans-serif;fill:#1f2937}.light{fill:#ffffff}"
LIGHT, DARK = (239, 246, 255), (29, 78, 216)  # of the smallest and the largest ratio
BELOW_ONE = (253, 186, 116)  # we are slower
HALF = 0.55  # darker than this, text turns white


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A table: rows from bottom to top, columns from left to right; None where nothing was measured."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]


def heat_map(panels: Sequence[Panel], *, title: str, x_name: str, y_name: str) -> str:
    """The panels from left to right; all have the first one's rows."""
    if not panels:
        raise ValueError("a heat map needs at least 1 panel")
    num_rows = len(panels[0].rows)
    width = LEFT + sum(CELL_W * len(panel.columns) + GAP for panel in panels)
    height = TOP + CELL_H * num_rows + BOTTOM
    found = [value for panel in panels for row in panel.values for value in row if value is not None]
    top = max([*found, 1.001])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22">{escape(title)}</text>',
    ]
    x = LEFT
    for panel in panels:
        parts += _panel(panel, x, top)
        x += CELL_W * len(panel.columns) + GAP
    for number, name in enumerate(panels[0].rows):
        y = TOP + CELL_H * (num_rows - number) - CELL_H / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>')
    middle = TOP + CELL_H * num_rows / 2
    parts.append(f'<text x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{escape(y_name)}</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, x: int, top: float) -> list[str]:
    num_rows = len(panel.rows)
    parts = [f'<text x="{x}" y="{TOP - 12}">{escape(panel.title)}</text>']
    for row, values in enumerate(panel.values):
        y = TOP + CELL_H * (num_rows - 1 - row)
        for column, value in enumerate(values):
            if value is None:
                continue
            left, depth = x + CELL_W * column, _depth(value, top)
            look = ' class="light"' if depth > HALF else ""
            parts.append(
                f'<rect x="{left}" y="{y}" width="{CELL_W - 2}" height="{CELL_H - 2}" fill="{_colour(value, depth)}"/>'
            )
            parts.append(
                f'<text x="{left + CELL_W / 2 - 1:.0f}" y="{y + CELL_H / 2 + 4:.0f}" text-anchor="middle"{look}>'
                f"{value:.2g}x</text>"
            )
    for column, name in enumerate(panel.columns):
        middle = x + CELL_W * column + CELL_W / 2 - 1
        y = TOP + CELL_H * num_rows + 16
        parts.append(f'<text x="{middle:.0f}" y="{y}" text-anchor="middle">{escape(name)}</text>')
    return parts


def _depth(value: float, top: float) -> float:
    """0 at a ratio of 1 or less, 1 at the largest; even steps of factors."""
    return min(1.0, max(0.0, math.log(max(value, 1.0)) / math.log(top)))


def _colour(value: float, depth: float) -> str:
    if value < 1:
        return f"rgb{BELOW_ONE}".replace(" ", "")
    mixed = tuple(round(light + (dark - light) * depth) for light, dark in zip(LIGHT, DARK, strict=True))
    return f"rgb{mixed}".replace(" ", "")
