"""Line charts beside each other as an SVG file, without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 420, 300, 56
COLOURS = ("#1f6fb4", "#d1495b", "#3a9d5d", "#c98a1b")
ENDS = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
FEW = 16
"""Points of a line that are marked."""


@dataclass
class Chart:
    """Lines over common axes, both from 0: the points `(x, y)` of each by its name."""

    title: str
    x: str
    lines: dict[str, tuple[Sequence[float], Sequence[float]]]

    def svg(self, left: float) -> str:
        """The chart, so far to the right."""
        most_x = max(max(x) for x, _ in self.lines.values()) or 1
        most_y = rounded_up(max(max(y) for _, y in self.lines.values()) or 1)
        wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
        bottom = HEIGHT - MARGIN
        parts = [
            f'<path d="M{MARGIN} {MARGIN}V{bottom}H{MARGIN + wide}" fill="none" stroke="#888"/>',
            f'<text x="{MARGIN}" y="{MARGIN - 24}" font-weight="bold">{self.title}</text>',
            f'<text x="{MARGIN + wide / 2}" y="{HEIGHT - 16}" text-anchor="middle">{self.x}</text>',
        ]
        for step in range(5):
            x, y = MARGIN + wide * step / 4, bottom - high * step / 4
            label = f'<text x="{MARGIN - 6}" y="{y + 4}" text-anchor="end">'
            parts.append(f"{label}{most_y * step / 4:.3g}</text>")
            label = f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">'
            parts.append(f"{label}{most_x * step / 4:.3g}</text>")
        names = []
        for (name, (xs, ys)), colour in zip(self.lines.items(), COLOURS):
            at = [(MARGIN + wide * x / most_x, bottom - high * y / most_y) for x, y in zip(xs, ys)]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
            if len(at) <= FEW:
                parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in at]
            names.append(f'<tspan dx="{12 * bool(names)}" fill="{colour}">{name}</tspan>')
        # Above the axes, where no line is.
        parts.append(f'<text x="{MARGIN}" y="{MARGIN - 8}" font-size="11">{"".join(names)}</text>')
        return f'<g transform="translate({left} 0)">{"".join(parts)}</g>'


def rounded_up(most: float) -> float:
    """The end of an axis whose quarters are short numbers."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(end * power for end in ENDS if end * power >= most * (1 - 1e-9))


def write(path: str, charts: list[Chart]) -> None:
    """Writes the charts into a file, from left to right."""
    body = "".join(chart.svg(WIDTH * at) for at, chart in enumerate(charts))
    size = f'width="{WIDTH * len(charts)}" height="{HEIGHT}"'
    font = 'font-family="sans-serif" font-size="12"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    text = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{ground}{body}</svg>'
    Path(path).write_text(text, encoding="utf-8")
