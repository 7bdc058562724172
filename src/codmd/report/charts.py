"""Charts as SVG text: pure functions of numbers. Each series has its own colour, dash and marker.

Colours come from the page's style sheet (`--series-0` and so on), so that one chart serves light, dark and
print; dashes and markers tell the series apart without colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]
DASHES = ("", "6 3", "", "2 2")
CORNERS: tuple[tuple[Point, ...], ...] = (
    ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    ((0, -1.3), (1.25, 1), (-1.25, 1)),
    ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
)


def marker(index: int, x: float, y: float, size: float = 3.2) -> str:
    """Circle, square, triangle, diamond: one a series."""
    if index == 0:
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    else:
        points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in CORNERS[min(index, 3) - 1])
        shape = f'<polygon points="{points}"/>'
    return f'<g class="mark s{index}">{shape}</g>'


def swatch(index: int) -> str:
    """A series' line and marker, for legends."""
    return (
        '<svg class="swatch" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">'
        f'<path class="line s{index}" d="M1 6H33"{_dash(index)}/>{marker(index, 17, 6)}</svg>'
    )


def radar(labels: Sequence[str], series: Mapping[str, Sequence[float]], name: str) -> str:
    """Values in [0, 1] around a circle. The centre is not 0 when all values are large; the rings say so."""
    size, radius = 380.0, 106.0
    centre = size / 2
    low = axis_start([v for values in series.values() for v in values])

    def place(i: int, value: float) -> Point:
        angle = 2 * math.pi * i / len(labels) - math.pi / 2
        reach = radius * max(0.0, (value - low) / (1 - low))
        return centre + reach * math.cos(angle), centre + reach * math.sin(angle)

    parts = []
    for ring in range(1, 5):
        value = low + (1 - low) * ring / 4
        parts.append(f'<path class="grid" d="{_path([place(i, value) for i in range(len(labels))])}Z"/>')
    for i in range(len(labels)):
        x, y = place(i, 1.0)
        parts.append(f'<path class="grid" d="M{centre:.1f} {centre:.1f}L{x:.1f} {y:.1f}"/>')
    for i, label in enumerate(labels):
        parts.append(_around(label, i, len(labels), centre, radius + 13))
    for index, (title, values) in enumerate(series.items()):
        points = [place(i, v) for i, v in enumerate(values)]
        fill = " filled" if index == len(series) - 1 else ""
        parts.append(f'<path class="line s{index}{fill}" d="{_path(points)}Z"{_dash(index)}/>')
        for (x, y), label, value in zip(points, labels, values, strict=True):
            tip = f"<title>{escape(title)}, {escape(label)}: {value:.3f}</title>"
            parts.append(f"<g>{tip}{marker(index, x, y, 2.6)}</g>")
    for ring in (0, 2, 4):
        value = low + (1 - low) * ring / 4
        y = centre - radius * ring / 4
        parts.append(_tick(f"{value:g}", centre + 4, y + 3, "start", halo=True))
    return _svg(size, size, name, parts)


def lines(
    series: Mapping[int, Sequence[tuple[float, float]]],
    name: str,
    *,
    titles: Sequence[str],
    level: float | None = None,
    x_label: str = "",
) -> str:
    """Curves over x, keyed by the series' index; `level` is a line across."""
    width, height = 340.0, 210.0
    left, right, top, bottom = 42.0, 12.0, 12.0, 34.0
    values = [y for points in series.values() for _, y in points] + ([level] if level is not None else [])
    xs = [x for points in series.values() for x, _ in points]
    ticks = nice_ticks(min(values, default=0.0), max(values, default=1.0))
    low, high = ticks[0], ticks[-1]
    far = max(xs, default=1.0) or 1.0

    def place(x: float, y: float) -> Point:
        across = left + (width - left - right) * x / far
        return across, height - bottom - (height - top - bottom) * (y - low) / (high - low)

    parts = []
    digits = max(0, min(4, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9)))
    for tick in ticks:
        _, y = place(0, tick)
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{width - right:.1f}"/>')
        parts.append(_tick(f"{tick:.{digits}f}", left - 6, y + 3.5, "end"))
    for tick in nice_ticks(0, far, count=5):
        if tick <= far and tick == round(tick):
            parts.append(_tick(f"{tick:g}", place(tick, low)[0], height - bottom + 15, "middle"))
    parts.append(_tick(x_label, (left + width - right) / 2, height - 4, "middle"))
    if level is not None:
        _, y = place(0, level)
        parts.append(f'<path class="line s0" d="M{left:.1f} {y:.1f}H{width - right:.1f}"/>')
        at_top = y < top + 16
        said = f"{titles[0]} {level:.3f}"
        parts.append(_tick(said, width - right - 3, y + (11 if at_top else -4), "end", halo=True))
    for index, points in series.items():
        at = [place(x, y) for x, y in points]
        parts.append(f'<path class="line s{index}" d="{_path(at)}"{_dash(index)}/>')
        for (x, y), (x_value, value) in zip(at, points, strict=True):
            tip = f"<title>{escape(titles[index])}, {x_value:g}: {value:.3f}</title>"
            parts.append(f"<g>{tip}{marker(index, x, y)}</g>")
    return _svg(width, height, name, parts)


def axis_start(values: Sequence[float]) -> float:
    """0, or a round number below all values when they crowd near 1."""
    least = min(values, default=0.0)
    return next((start for start in (0.8, 0.6, 0.4, 0.2) if least >= start + 0.02), 0.0)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that span [low, high]; at least two."""
    if not high - low > 1e-9:
        low, high = low - 0.05, high + 0.05
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _around(label: str, i: int, count: int, centre: float, radius: float) -> str:
    """A label on the rim, one word a line."""
    angle = 2 * math.pi * i / count - math.pi / 2
    x, y = centre + radius * math.cos(angle), centre + radius * math.sin(angle)
    words = label.split(" ", 1)
    anchor = "middle" if abs(math.cos(angle)) < 0.2 else "start" if math.cos(angle) > 0 else "end"
    first = y + 4 - 6 * (len(words) - 1) + 5 * math.sin(angle) * (len(words) - 1)
    spans = "".join(f'<tspan x="{x:.1f}" y="{first + 12 * n:.1f}">{escape(w)}</tspan>' for n, w in enumerate(words))
    return f'<text class="label" text-anchor="{anchor}">{spans}</text>'


def _tick(text: str, x: float, y: float, anchor: str, *, halo: bool = False) -> str:
    kind = "tick halo" if halo else "tick"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def _dash(index: int) -> str:
    dash = DASHES[min(index, 3)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _svg(width: float, height: float, name: str, parts: Sequence[str]) -> str:
    label = escape(name, quote=True)
    box = f"0 0 {width:g} {height:g}"
    return f'<svg class="chart" viewBox="{box}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
