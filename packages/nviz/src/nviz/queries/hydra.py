"""What the judge pipeline's folders say: scores, states, agreement, acceptance, examples.

Tables are asked by DuckDB over the Parquet files themselves; JSON is picked apart with care, as its
fields may be missing or of another type. Letters: D dimensions of the rubric, S scores 0 to 5, B
bins of quality.
"""

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nviz.store.parse import items, mapping, number_or_nan, parse_json
from nviz.store.plain import is_plain, open_plain, read_plain

Triple = tuple[float, float, float]

SCORES = 6
BINS = 25
# A curve's name here and in the files.
CURVES = (("share kept", "share"), ("precision", "precision"), ("recall", "recall"))
LONGEST_SAMPLE_BYTES = 8 << 20
LARGEST_RUBRIC_BYTES = 1 << 20
# What DuckDB would take for a pattern in the name of a file.
GLOB = re.compile(r"([*?\[])")


@dataclass(frozen=True, slots=True)
class Scores:
    """How often each score was given: `count_DS`, by dimension."""

    dimensions: list[str]
    count_DS: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Quality:
    """Documents of a filtered corpus by quality: `count_B` per decision, `edge_B1` of the bins."""

    edge_B1: NDArray[np.float64]
    count_B: dict[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What keeping all from a quality on keeps; thresholds by name. NaN where unknown.

    `bounds` are the lower and upper ends of each curve's intervals.
    """

    threshold: list[float]
    curves: dict[str, list[float]]
    thresholds: dict[str, float]
    bounds: dict[str, tuple[list[float], list[float]]]

    def at(self, curve: str, threshold: float) -> Triple:
        """A curve's value and interval at a threshold, between its points in a straight line."""
        rows = (self.curves[curve], *self.bounds[curve])
        value, low, high = (_between(self.threshold, row, threshold) for row in rows)
        return value, low, high


@dataclass(frozen=True, slots=True)
class Agreement:
    """One head and dimension: Spearman's correlation, its interval, and the other numbers."""

    head: str
    dimension: str
    documents: int | None
    numbers: dict[str, Triple]
    verdict: str


@dataclass(frozen=True, slots=True)
class Example:
    """A document shown: its band, quality, one line about it, its text, scores by dimension."""

    band: str
    quality: float
    line: str
    text: str
    scores: dict[str, float]


def status_counts(folder: Path) -> list[tuple[str, str, str, int]]:
    """(model, status, detail, labels) of labels.parquet, the commonest first.

    Raises duckdb.Error if the file is not there or no such table.
    """
    rows = _ask(
        "SELECT model, status, detail, count(*) AS labels FROM read_parquet(?) "
        "GROUP BY ALL ORDER BY labels DESC, model, status, detail",
        [folder / "labels.parquet"],
    )
    return [
        (str(model), str(status), str(detail or ""), int(n)) for model, status, detail, n in rows
    ]


def score_counts(folder: Path) -> Scores:
    """Scores of labels.parquet; dimensions by the folder's rubric.

    Raises duckdb.Error if the file is not there or no such table.
    """
    rows = _ask(
        "SELECT place, score, count(*) FROM (SELECT unnest(scores) AS score, "
        "generate_subscripts(scores, 1) AS place FROM read_parquet(?) WHERE scores IS NOT NULL) "
        "GROUP BY ALL",
        [folder / "labels.parquet"],
    )
    return _scores(dimensions(folder), rows)


def _scores(names: list[str], rows: list[tuple[Any, ...]]) -> Scores:
    """Counts by dimension from rows (place from 1, score, count)."""
    width = max([len(names), *(int(at) for at, _, _ in rows)])
    names = [names[i] if i < len(names) else f"dimension {i + 1}" for i in range(width)]
    count_DS = np.zeros((width, SCORES), dtype=np.int64)
    for at, score, count in rows:
        if score is not None and 0 <= score < SCORES:
            count_DS[at - 1, score] = count
    return Scores(names, count_DS)


def dimensions(folder: Path) -> list[str]:
    """Names of the dimensions in rubric.toml, [] if it cannot be read."""
    try:
        content = tomllib.loads(
            (read_plain(folder / "rubric.toml", LARGEST_RUBRIC_BYTES) or b"").decode()
        )
    except (OSError, ValueError):
        return []
    return [str(mapping(item).get("name", "?")) for item in items(content.get("dimensions"))]


def quality_counts(folder: Path) -> Quality:
    """Qualities in scores/*.parquet of a filtered corpus, in `BINS` bins from 0 to 1.

    Raises duckdb.Error if there are none.
    """
    rows = _ask(
        f"SELECT decision, least(floor(quality * {BINS}), {BINS - 1})::INT AS bin, count(*) "
        "FROM read_parquet(?) WHERE isfinite(quality) GROUP BY ALL",
        _scores_files(folder),
    )
    count_B: dict[str, NDArray[np.int64]] = {}
    for decision, at, count in rows:
        counts = count_B.setdefault(str(decision), np.zeros(BINS, dtype=np.int64))
        counts[max(0, at)] += count
    return Quality(np.linspace(0.0, 1.0, BINS + 1), count_B)


def acceptance(calibration: object) -> Acceptance | None:
    """The acceptance curve in head.json or report.json, None if there is none."""
    found = mapping(calibration)
    points = [mapping(point) for point in items(found.get("curve"))]
    marks = {
        "drop": number_or_nan(found.get("tau_drop")),
        "keep": number_or_nan(found.get("tau_keep")),
    }
    thresholds = {name: value for name, value in marks.items() if math.isfinite(value)}
    if not points and not thresholds:
        return None
    triples = {label: [_items(point.get(key)) for point in points] for label, key in CURVES}
    return Acceptance(
        threshold=[number_or_nan(point.get("threshold")) for point in points],
        curves={label: [value for value, _, _ in found] for label, found in triples.items()},
        thresholds=thresholds,
        bounds={
            label: ([low for _, low, _ in found], [high for _, _, high in found])
            for label, found in triples.items()
        },
    )


def scores_arrow(found: Scores) -> pa.Table:
    """Rows of dimension, score and count, for a download."""
    return pa.table(
        {
            "dimension": np.repeat(found.dimensions, found.count_DS.shape[1]),
            "score": np.tile(np.arange(found.count_DS.shape[1]), len(found.dimensions)),
            "count": found.count_DS.ravel(),
        }
    )


def quality_arrow(found: Quality) -> pa.Table:
    """Rows of decision, the bin's two edges and documents, for a download."""
    bins = len(found.edge_B1) - 1
    return pa.table(
        {
            "decision": np.repeat(list(found.count_B), bins),
            "from": np.tile(found.edge_B1[:-1], len(found.count_B)),
            "to": np.tile(found.edge_B1[1:], len(found.count_B)),
            "documents": np.concatenate([*found.count_B.values(), np.zeros(0, dtype=np.int64)]),
        }
    )


def acceptance_arrow(found: Acceptance) -> pa.Table:
    """A row a threshold with each curve and its interval, for a download."""
    columns = {"threshold": found.threshold}
    for name, values in found.curves.items():
        low, high = found.bounds[name]
        columns |= {name: values, f"{name} low": low, f"{name} high": high}
    return pa.table(columns)


def agreements_arrow(found: Sequence[Agreement]) -> pa.Table:
    """Rows of head, dimension, documents, number, value and interval, for a download."""
    rows = [
        (item.head, item.dimension, item.documents, name, *triple)
        for item in found
        for name, triple in item.numbers.items()
    ]
    names = ("head", "dimension", "documents", "number", "value", "low", "high")
    return pa.table({name: [row[at] for row in rows] for at, name in enumerate(names)})


def band_of(quality: float, drop: float, keep: float) -> str:
    """What happens to a document of that quality: drop, keep, or the band between."""
    if quality >= keep:
        return "keep"
    return "drop" if quality < drop else "band"


def band_counts(folder: Path, drop: float, keep: float) -> dict[str, int]:
    """Documents of scores/*.parquet that these thresholds would drop, keep, or leave between.

    Raises duckdb.Error if there are none.
    """
    ((dropped, band, kept),) = _ask(
        "SELECT count(*) FILTER (quality < $2 AND quality < $3), "
        "count(*) FILTER (quality >= $2 AND quality < $3), count(*) FILTER (quality >= $3) "
        "FROM read_parquet($1) WHERE isfinite(quality)",
        _scores_files(folder),
        drop,
        keep,
    )
    return {"drop": dropped, "band": band, "keep": kept}


def predicted_scores(folder: Path, names: list[str]) -> Scores:
    """Predicted scores in scores/*.parquet, rounded to whole ones, by dimension.

    Raises duckdb.Error if there are none.
    """
    rows = _ask(
        "SELECT place, least(greatest(round(score), 0), 5)::INT AS score, count(*) FROM "
        "(SELECT unnest(scores) AS score, generate_subscripts(scores, 1) AS place "
        "FROM read_parquet($1) WHERE scores IS NOT NULL) WHERE isfinite(score) GROUP BY ALL",
        _scores_files(folder),
    )
    return _scores(names, rows)


def agreements(report: dict[str, Any]) -> list[Agreement]:
    """The agreement table of report.json."""
    found = []
    for entry in map(mapping, items(report.get("agreement"))):
        documents = entry.get("documents")
        numbers = {name: _triple(value) for name, value in entry.items() if isinstance(value, dict)}
        found.append(
            Agreement(
                head=str(entry.get("head", "?")),
                dimension=str(entry.get("dimension", "?")),
                documents=documents if isinstance(documents, int) else None,
                numbers=numbers,
                verdict=str(entry.get("verdict", "")),
            )
        )
    return found


def report_examples(report: dict[str, Any]) -> list[Example]:
    """The examples of report.json, by band."""
    return [
        Example(
            band=str(entry.get("band", "?")),
            quality=number_or_nan(entry.get("quality")),
            line=f"quality {number_or_nan(entry.get('quality')):.2f}, by label "
            f"{number_or_nan(entry.get('label_quality')):.2f}; {entry.get('domain', '?')}",
            text=str(entry.get("text", "")),
            scores=_numbers(entry.get("scores")),
        )
        for entry in map(mapping, items(report.get("examples")))
    ]


def dropped_examples(folder: Path, most: int = 50) -> list[Example]:
    """The first documents of dropped.jsonl; lines that are no records are passed over."""
    try:
        with open_plain(folder / "dropped.jsonl") as file:
            lines = file.read(LONGEST_SAMPLE_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for line in lines[:most]:
        try:
            entry = mapping(parse_json(line))
        except ValueError:
            continue
        quality = number_or_nan(entry.get("quality"))
        found.append(
            Example(
                band=f"dropped by {entry.get('decided_by', '?')}",
                quality=quality,
                line=f"quality {quality:.2f}; {entry.get('source', '?')}",
                text=str(entry.get("text", "")),
                scores=_numbers(entry.get("scores")),
            )
        )
    return found


def _ask(sql: str, paths: list[Path], *more: float) -> list[tuple[Any, ...]]:
    """Rows of a query over the plain files among `paths`."""
    names = [GLOB.sub(r"[\1]", str(path)) for path in paths if is_plain(path)]
    if not names:
        raise duckdb.IOException("there is no such file yet")
    with duckdb.connect(":memory:") as connection:
        return connection.execute(sql, [names, *more]).fetchall()


def _scores_files(folder: Path) -> list[Path]:
    inside = folder / "scores"
    return [] if inside.is_symlink() else sorted(inside.glob("*.parquet"))


def _numbers(value: object) -> dict[str, float]:
    return {str(name): number_or_nan(item) for name, item in mapping(value).items()}


def _items(value: object) -> Triple:
    """The first three numbers of a list, NaN for what is not there."""
    first, second, third = (*map(number_or_nan, items(value)[:3]), math.nan, math.nan, math.nan)[:3]
    return first, second, third


def _between(xs: list[float], ys: list[float], x: float) -> float:
    """`ys` at `x` by straight lines between the known points, NaN outside of them."""
    pairs = zip(xs, ys, strict=True)
    known = np.array(sorted((a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)))
    if not len(known):
        return math.nan
    return float(np.interp(x, known[:, 0], known[:, 1], left=math.nan, right=math.nan))


def _triple(value: object) -> Triple:
    found = mapping(value)
    return (
        number_or_nan(found.get("value")),
        number_or_nan(found.get("low")),
        number_or_nan(found.get("high")),
    )
