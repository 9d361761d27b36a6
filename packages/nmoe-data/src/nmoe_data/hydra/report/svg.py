"""Small charts as SVG text: intervals, bars, curves. Colours come from the page's style sheet.

Numbers are the only foreign thing in the drawings; every label is escaped.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROW, LEFT, WIDTH, PAD = 26, 150, 640, 60
PLOT_HEIGHT = 220


@dataclass(frozen=True, slots=True)
class Interval:
    """A labelled point with its interval; `good` decides the colour. value None: only `note`."""

    label: str
    value: float | None
    low: float
    high: float
    good: bool
    note: str = ""


def interval_chart(rows: Sequence[Interval], low: float, high: float, title: str) -> str:
    """Returns a row per interval on one axis from `low` to `high`, with a line at zero."""
    span = WIDTH - LEFT - PAD

    def x(value: float) -> float:
        return LEFT + span * (min(max(value, low), high) - low) / (high - low)

    height = ROW * len(rows) + 34
    parts = []
    for mark in _marks(low, high):
        kind = "zero" if mark == 0 else "grid"
        parts.append(_line(x(mark), 8, x(mark), height - 24, kind))
        parts.append(_text(x(mark), height - 8, f"{mark:g}", "mark", "middle"))
    for number, row in enumerate(rows):
        y = 20 + ROW * number
        parts.append(_text(LEFT - 10, y + 4, row.label, "label", "end"))
        if row.value is None:
            parts.append(_text(LEFT + 6, y + 4, row.note, "mark", "start"))
            continue
        kind = "good" if row.good else "bad"
        parts.append(_line(x(row.low), y, x(row.high), y, f"interval {kind}"))
        parts.append(f'<circle cx="{x(row.value):.1f}" cy="{y}" r="4.5" class="{kind}"/>')
        parts.append(_text(WIDTH - PAD + 12, y + 4, f"{row.value:.3f}", "label", "start"))
    return _svg(parts, WIDTH, height, title)


def curve_chart(
    x: Sequence[float],
    curves: Mapping[str, Sequence[float | None]],
    verticals: Mapping[str, float],
    title: str,
    x_title: str,
) -> str:
    """Returns curves over x, all of them in 0..1, with named vertical lines."""
    left, right, top, bottom = 46, WIDTH - 20, 16, PLOT_HEIGHT - 40

    def at(value: float) -> float:
        return left + (right - left) * value

    def up(value: float) -> float:
        return bottom - (bottom - top) * value

    parts = []
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line(left, up(mark), right, up(mark), "grid"))
        parts.append(_text(left - 8, up(mark) + 4, f"{mark:g}", "mark", "end"))
        parts.append(_text(at(mark), bottom + 16, f"{mark:g}", "mark", "middle"))
    for number, (name, values) in enumerate(curves.items()):
        points = " ".join(
            f"{at(a):.1f},{up(b):.1f}"
            for a, b in zip(x, values, strict=True)
            if b is not None and math.isfinite(b)
        )
        parts.append(f'<polyline points="{points}" class="curve c{number}"/>')
        parts.append(
            _text(left + 8 + 150 * number, PLOT_HEIGHT - 6, name, f"key c{number}", "start")
        )
    for number, (name, value) in enumerate(verticals.items()):
        parts.append(_line(at(value), top, at(value), bottom, "threshold"))
        parts.append(_text(at(value) + 4, top + 10 + 13 * number, name, "mark", "start"))
    parts.append(_text(right, PLOT_HEIGHT - 6, x_title, "mark", "end"))
    return _svg(parts, WIDTH, PLOT_HEIGHT, title)


def bar_chart(bars: Sequence[tuple[str, float, str]], title: str) -> str:
    """Returns horizontal bars: (label, share of the whole width in 0..1, what stands behind it)."""
    span = WIDTH - LEFT - 150
    parts = []
    for number, (label, share, note) in enumerate(bars):
        y = 8 + ROW * number
        width = max(1.0, span * min(max(share, 0.0), 1.0))
        parts.append(_text(LEFT - 10, y + 14, label, "label", "end"))
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="18" rx="3" class="bar"/>'
        )
        parts.append(_text(LEFT + width + 8, y + 14, note, "mark", "start"))
    return _svg(parts, WIDTH, ROW * len(bars) + 12, title)


def _marks(low: float, high: float) -> list[float]:
    step = 0.25 if high - low <= 2.5 else 1.0
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _svg(parts: Sequence[str], width: int, height: int, title: str) -> str:
    safe = html.escape(title, quote=True)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{safe}">{"".join(parts)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'class="{html.escape(kind)}"/>'
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
        f"{html.escape(text)}</text>"
    )
