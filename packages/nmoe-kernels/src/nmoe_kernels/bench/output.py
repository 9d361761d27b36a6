"""Where the figures go: lines for people, JSON, CSV, and a chart in SVG."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nmoe_kernels.bench.measure import Measurement
from nmoe_kernels.errors import KernelError

BAR_HEIGHT, BAR_WIDTH, LABEL_WIDTH, FONT = 16, 420, 150, 12
COLOURS = ("#2a6f97", "#e76f51", "#2a9d8f", "#e9c46a", "#6d597a", "#8d99ae")


def line(found: Measurement) -> str:
    """One contender for people."""
    if not found.times:
        return f"  {found.contender:15s} {found.note}"
    parts = [f"  {found.contender:15s}"]
    for name, times in found.times.items():
        share = f" {found.share[name]:4.0%}" if name in found.share else ""
        spread = f"({times.p25_ms:.3f}-{times.p75_ms:.3f})"
        parts.append(f"{name} {times.ms:.3f} ms {spread} {found.tflops[name]:.3g} TFLOP/s{share} ")
    if found.peak_gib is not None:
        parts.append(f"peak {found.peak_gib:.2f} GiB")
    if found.first_call_cold_s is not None and found.first_call_warm_s is not None:
        first = f"{found.first_call_cold_s:.1f} s, cached {found.first_call_warm_s:.1f} s"
        parts.append(f"first call {first}")
    if found.error is not None:
        parts.append(f"error {found.error:.1e}")
    return " ".join(parts)


def check_targets(*files: Path | None) -> None:
    """Raises KernelError E-BENCH before anything is measured if a file could not be written."""
    for file in files:
        if file is not None and (not file.parent.is_dir() or file.is_dir()):
            raise KernelError(
                "E-BENCH", f"cannot write {file}", "name a file in a folder that exists"
            )


def write(file: Path, text: str) -> None:
    """Replaces a file at once, so that a killed run leaves the figures of the shapes before.

    Raises KernelError E-BENCH if it cannot be written.
    """
    new = file.with_name(file.name + ".tmp")
    try:
        new.write_text(text)
        new.replace(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise KernelError("E-BENCH", f"cannot write {file}: {reason}", "choose another") from error


def as_json(report: Mapping[str, Any], rows: Sequence[Measurement]) -> str:
    """The report with its rows; a number that is none is null."""
    whole = {**report, "rows": [_finite(row.flat()) for row in rows]}
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def as_csv(rows: Sequence[Measurement]) -> str:
    """A line for each contender, columns named as in the JSON."""
    flat = [row.flat() for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def as_chart(title: str, rows: Sequence[Measurement]) -> str:
    """Horizontal bars of the median times in ms, grouped by shape, routing and pass, as SVG."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        for name, times in row.times.items():
            group = groups.setdefault(f"{row.shape} {row.routing}: {name}", [])
            group.append((row.contender, times.ms))
    return bars(f"{title}, ms", groups)


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    """Horizontal bars of named values, in groups of one scale each, as SVG."""
    names = list(dict.fromkeys(name for group in groups.values() for name, _ in group))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    parts, y = [_text(0, FONT, title)], 2 * BAR_HEIGHT
    for label, group in groups.items():
        parts.append(_text(0, y + FONT, label))
        y += BAR_HEIGHT
        longest = max(value for _, value in group)
        for name, value in group:
            width = BAR_WIDTH * value / longest
            parts.append(_text(8, y + FONT, name))
            parts.append(
                f'<rect x="{LABEL_WIDTH}" y="{y + 2}" width="{width:.1f}" '
                f'height="{BAR_HEIGHT - 4}" fill="{colours[name]}"/>'
            )
            parts.append(_text(LABEL_WIDTH + width + 6, y + FONT, f"{value:.3f}"))
            y += BAR_HEIGHT
        y += BAR_HEIGHT // 2
    size = f'width="{LABEL_WIDTH + BAR_WIDTH + 80}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"'
    return "\n".join([f'{head} font-size="{FONT}">', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no inf and no NaN; the note says what was wrong."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
