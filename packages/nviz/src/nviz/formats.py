"""How numbers, times and foreign text are written on the pages."""

import html
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

# Everything that starts markup in Streamlit's Markdown: emphasis, links, HTML, maths, directives.
MARKUP = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&@/=])")
# What turns the direction of the text around it, and what is no sign at all.
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
SYMBOLS = {
    "running": "▶",
    "stalled": "!",
    "completed": "✓",
    "interrupted": "■",
    "failed": "✕",
    "unreadable": "?",
}


def escaped(text: str) -> str:
    """`text` as Markdown that shows it letter by letter, on one line."""
    return MARKUP.sub(r"\\\1", one_line(text))


def one_line(text: str) -> str:
    """`text` on one line, without control signs."""
    return without_controls(" ".join(text.split()))


def without_controls(text: str) -> str:
    """`text` with its control signs replaced, line ends aside: one may reverse all that stands
    behind it, or command a terminal.
    """
    return CONTROLS.sub("\ufffd", text)


def shortened(text: str, most: int) -> str:
    """`text` of at most `most` signs: its beginning and its end, which tell names apart."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"


def chart_text(text: str, most: int = 48) -> str:
    """Foreign text for a chart, where Plotly reads some HTML: on one line, shortened, escaped."""
    return html.escape(shortened(one_line(text), most), quote=False)


def status(name: str) -> str:
    """A run's status with a symbol, so that it is not told by colour alone."""
    return f"{SYMBOLS.get(name, '?')} {name}"


def value(number: float | None, digits: int = 4) -> str:
    """A measured value with `digits` significant digits, a dash for none, a word if non-finite."""
    if number is None:
        return "–"
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    if number != 0 and (abs(number) >= 1e15 or abs(number) < 1e-4):
        return f"{number:.{digits - 1}e}"
    # Digits before the point; fewer than none where zeros follow it.
    whole = math.floor(math.log10(abs(number))) + 1 if number else 1
    return f"{number:,.{max(0, digits - whole)}f}"


def count(number: float | None) -> str:
    """A whole number with separators, a dash for none."""
    return "–" if number is None or not math.isfinite(number) else f"{int(number):,}"


def short(number: float | None) -> str:
    """A large number with three digits and a unit: 12.3k, 4.56M, 7.89B."""
    if number is None or not math.isfinite(number):
        return value(number)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds in the two largest units that fit: 45 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(unix_s: float | None) -> datetime | None:
    """Seconds since the epoch as a time in UTC; None for none, or for no time of this calendar."""
    try:
        return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC)
    except (OverflowError, OSError, ValueError):
        return None


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Rows as an Arrow table. Equal column names are numbered; mixed types become text."""
    names: list[str] = []
    for name in columns:
        again = names.count(name) + sum(other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({again + 1})" if again else name)
    values = [_array([row[i] for row in rows]) for i in range(len(names))]
    return pa.Table.from_arrays(values, names=names)


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return pa.array([None if value is None else str(value) for value in values])
