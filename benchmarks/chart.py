"""A line chart as SVG, written by hand so that it needs no library: two rewards over training steps."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 44, 48
COLOURS = ("#2563eb", "#c2410c")
DASHES = ("none", "6 4")  # lines differ in more than colour
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2937}.grid{stroke:#d1d5db;stroke-width:1}"
    "polyline{fill:none;stroke-width:2}"
)


def line_chart(curves: Mapping[str, Sequence[float]], *, title: str, x_name: str, y_name: str, y_max: float) -> str:
    """The curves over 1, 2, ...; the y axis goes from 0 to `y_max`. At most as many curves as COLOURS."""
    if not 0 < len(curves) <= len(COLOURS):
        raise ValueError(f"{len(curves)} curves; the chart has colours for 1 to {len(COLOURS)}")
    num_points = max(len(values) for values in curves.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18">{escape(title)}</text>',
        *_axes(num_points, y_max, x_name, y_name),
    ]
    for i, (name, values) in enumerate(curves.items()):
        points = " ".join(f"{_x(k, num_points):.1f},{_y(value, y_max):.1f}" for k, value in enumerate(values))
        look = f'stroke="{COLOURS[i]}" stroke-dasharray="{DASHES[i]}"'
        legend_x = LEFT + 160 * i
        parts += [
            f'<polyline points="{points}" {look}/>',
            f'<polyline points="{legend_x},32 {legend_x + 24},32" {look}/>',
            f'<text x="{legend_x + 30}" y="36">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(num_points: int, y_max: float, x_name: str, y_name: str) -> list[str]:
    parts = []
    for k in range(5):
        value = y_max * k / 4
        y = _y(value, y_max)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2g}</text>')
    for k in range(num_points):
        x = _x(k, num_points)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{k + 1}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{escape(y_name)}</text>"
    )
    return parts


def _x(index: int, num_points: int) -> float:
    return LEFT + 12 + (WIDTH - LEFT - RIGHT - 24) * index / max(num_points - 1, 1)


def _y(value: float, y_max: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / y_max
