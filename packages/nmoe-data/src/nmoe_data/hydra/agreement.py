"""How well two sets of scores agree, with bootstrap intervals over documents.

A resample of N documents is a vector of multiplicities m (how often each was drawn), and every
statistic here is written as a function of m: moments are sums of m times something, and the
mid-rank of a group of equal values is the multiplicity below it plus half of (its own + 1), so one
sort serves all resamples. Intervals are percentiles (Efron and Tibshirani, "An introduction to the
bootstrap", 1993, chapter 13). A statistic without a meaning is NaN and says why, such as a
correlation with a constant.

Letters: N documents, R resamples, D dimensions of the rubric.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nmoe_data.errors import DataError

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]

RESAMPLES = 1000
LEVEL = 0.95
CHUNK_CELLS = 1 << 22
F1_THRESHOLDS = (3.0,)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its bootstrap interval. reason: why it is NaN, "" if it is a number."""

    value: float
    low: float
    high: float
    reason: str = ""

    @property
    def is_positive(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low > 0

    def __str__(self) -> str:
        if self.reason:
            return f"none ({self.reason})"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_json(self) -> dict[str, Any]:
        """Returns value, low, high and reason, NaN as null once it is JSON."""
        return asdict(self)


def agreement(
    predicted: npt.ArrayLike,
    labelled: npt.ArrayLike,
    *,
    thresholds: Sequence[float] = F1_THRESHOLDS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Returns what two lists of N scores have in common, each with its 95 % interval.

    spearman, pearson; mae: mean absolute difference; kappa: quadratically weighted (Cohen 1968; for
    real numbers it is Lin's concordance coefficient, 1989); `f1_at_T` for each of `thresholds`:
    of "at least T", `labelled` being the truth.
    resamples: R. seed: chooses them.

    Raises DataError: E-ARGUMENT if the lists differ in length or hold numbers that are not finite.
    """
    x, y = _checked(predicted, labelled)
    statistics: dict[str, Statistic] = {
        "spearman": _spearman(x, y),
        "pearson": lambda m: _correlation(m, x, y),
        "mae": lambda m: m @ np.abs(x - y) / m.sum(axis=1),
        "kappa": lambda m: _concordance(m, x, y),
    }
    statistics |= {f"f1_at_{t:g}": _f1(x >= t, y >= t) for t in thresholds}
    found = estimates(statistics, len(x), resamples=resamples, seed=seed)
    return {name: _explained(name, one, x, y) for name, one in found.items()}


def estimates(
    statistics: dict[str, Statistic], count: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Estimate]:
    """Returns statistics of `count` documents with percentile intervals.

    A statistic maps multiplicities [R, N] to values [R], NaN where it has no meaning.
    """
    if count == 0:
        unknown = Estimate(float("nan"), float("nan"), float("nan"), "no documents")
        return dict.fromkeys(statistics, unknown)
    whole = np.ones((1, count))
    drawn: dict[str, list[Floats]] = {name: [] for name in statistics}
    for multiplicities in resampled(count, resamples, seed):
        for name, statistic in statistics.items():
            drawn[name].append(statistic(multiplicities))
    return {
        name: _interval(float(statistic(whole)[0]), np.concatenate(drawn[name]))
        for name, statistic in statistics.items()
    }


def resampled(count: int, resamples: int, seed: int) -> Iterator[Floats]:
    """Yields the multiplicities of `resamples` resamples in pieces [r, N] of bounded size."""
    rows = max(1, CHUNK_CELLS // count)
    for first in range(0, resamples, rows):
        # Counted from the first resample of the piece, so that the pieces' size changes nothing.
        part = [
            np.bincount(
                np.random.default_rng((seed, number)).integers(0, count, count), None, count
            )
            for number in range(first, min(first + rows, resamples))
        ]
        yield np.array(part, np.float64)


def between_judges(
    labels: pa.Table, dimensions: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[dict[str, Any]]:
    """Returns how each pair of judges agrees in each dimension, on what both of them scored.

    labels: the rows of labels.parquet. Each entry has judges (two models), dimension, documents,
    exact (share of equal scores) and the statistics of `agreement` as JSON.
    """
    scores: dict[str, dict[str, list[int]]] = {}
    for row in labels.select(["document_id", "model", "scores"]).to_pylist():
        if row["scores"] is not None:
            scores.setdefault(row["model"], {})[row["document_id"]] = row["scores"]
    entries = []
    for one, other in combinations(sorted(scores), 2):
        shared = sorted(scores[one].keys() & scores[other].keys())
        for at, dimension in enumerate(dimensions):
            x = np.array([scores[one][id][at] for id in shared], np.float64)
            y = np.array([scores[other][id][at] for id in shared], np.float64)
            found = agreement(x, y, resamples=resamples, seed=seed)
            entries.append(
                {
                    "judges": [one, other],
                    "dimension": dimension,
                    "documents": len(shared),
                    "exact": float((x == y).mean()) if shared else None,
                    **{name: estimate.to_json() for name, estimate in found.items()},
                }
            )
    return entries


def _checked(predicted: npt.ArrayLike, labelled: npt.ArrayLike) -> tuple[Floats, Floats]:
    x, y = np.asarray(predicted, np.float64), np.asarray(labelled, np.float64)
    if x.ndim != 1 or x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise DataError(
            "E-ARGUMENT",
            f"scores of shapes {x.shape} and {y.shape} cannot be compared",
            "give two lists of finite numbers of the same length",
        )
    return x, y


def _interval(value: float, drawn: Floats) -> Estimate:
    known = drawn[np.isfinite(drawn)]
    if not np.isfinite(value):
        return Estimate(float("nan"), float("nan"), float("nan"), "it has no meaning here")
    if not len(known):
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.percentile(known, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Estimate(value, float(low), float(high))


def _explained(name: str, estimate: Estimate, x: Floats, y: Floats) -> Estimate:
    if not estimate.reason:
        return estimate
    if len(x) < 2:
        reason = "one document" if len(x) else "no documents"
    elif name.startswith("f1_at_"):
        reason = f"neither side reaches {name.removeprefix('f1_at_')}"
    else:
        constant = "predictions" if np.ptp(x) == 0 else "labels"
        reason = f"all {constant} are equal"
    return Estimate(estimate.value, estimate.low, estimate.high, reason)


def _moments(m: Floats, x: Floats, y: Floats) -> tuple[Floats, ...]:
    """Returns means, variances and covariance [R] of x and y, each [N] or [R, N], under m."""
    total = m.sum(axis=1, keepdims=True)
    mean_x = (m * x).sum(axis=1, keepdims=True) / total
    mean_y = (m * y).sum(axis=1, keepdims=True) / total
    dx, dy = x - mean_x, y - mean_y
    parts = (m * dx * dx, m * dy * dy, m * dx * dy)
    variances = (part.sum(axis=1) / total[:, 0] for part in parts)
    return mean_x[:, 0], mean_y[:, 0], *variances


def _divided(above: Floats, below: Floats) -> Floats:
    """Returns above / below, NaN where below is zero but for rounding."""
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 1e-12)


def _correlation(m: Floats, x: Floats, y: Floats) -> Floats:
    *_, var_x, var_y, covariance = _moments(m, x, y)
    return np.clip(_divided(covariance, np.sqrt(var_x * var_y)), -1.0, 1.0)


def _concordance(m: Floats, x: Floats, y: Floats) -> Floats:
    mean_x, mean_y, var_x, var_y, covariance = _moments(m, x, y)
    return _divided(2 * covariance, var_x + var_y + (mean_x - mean_y) ** 2)


def _spearman(x: Floats, y: Floats) -> Statistic:
    rank_x, rank_y = _ranker(x), _ranker(y)
    return lambda m: _correlation(m, rank_x(m), rank_y(m))


def _ranker(x: Floats) -> Statistic:
    """Returns the map from multiplicities [R, N] to the mid-ranks [R, N] of `x` in each resample.

    Ranks are divided by N, so that a tolerance for variances suits them as it suits scores.
    """
    order = np.argsort(x, kind="stable")
    ordered = x[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=np.nan) != 0)
    group = np.empty(len(x), np.int64)
    group[order] = np.cumsum(np.diff(ordered, prepend=np.nan) != 0) - 1

    def ranks(m: Floats) -> Floats:
        counts = np.add.reduceat(m[:, order], firsts, axis=1)
        middles = np.cumsum(counts, axis=1) - (counts - 1) / 2
        return middles[:, group] / len(x)

    return ranks


def _f1(predicted: npt.NDArray[np.bool_], labelled: npt.NDArray[np.bool_]) -> Statistic:
    hits = (predicted & labelled).astype(np.float64)
    errors = (predicted ^ labelled).astype(np.float64)
    return lambda m: _divided(2 * (m @ hits), 2 * (m @ hits) + m @ errors)
