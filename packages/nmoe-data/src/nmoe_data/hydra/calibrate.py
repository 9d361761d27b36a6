"""From predicted scores to a decision: weights of the dimensions and two thresholds.

Quality is the weighted mean of a document's scores divided by 5, so it lies in 0..1. Below tau_drop
a document is dropped, from tau_keep on it is kept, and between them lies the band, which may go to
the judge itself.

What the weights are chosen for: the label quality of a held-out document is the mean of its
labels (or the weighted mean, where the user names weights), and the weights are those >= 0 with sum
1 whose quality of the *predicted* scores comes nearest to it in the least squares. A dimension that
the heads predict badly thus counts less.

How the thresholds follow, with shares weighted by what each document stands for in the corpus:
- target keep k, band b: tau_keep keeps the best k - b/2, tau_drop leaves the best k + b/2. A larger
  share never has a larger threshold, so tau_drop <= tau_keep for any k and b.
- target precision p: tau_keep is the smallest threshold from which on a share of p is good by
  label, and tau_drop the one that leaves b more than it keeps.
- the probe decides with tau_drop alone, so tau_drop is lowered until the probe drops at most
  MOST_LOST of what the judge head would keep.

Letters: N documents, D dimensions of the rubric, R resamples, T thresholds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from nmoe_data.errors import DataError
from nmoe_data.hydra.agreement import LEVEL, RESAMPLES, Estimate, agreement, resampled
from nmoe_data.hydra.encoder.contract import FloatArray

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Triple = tuple[float, float, float]

HIGHEST_SCORE = 5.0
GOOD = 0.6
BAND = 0.1
MOST_LOST = 0.01
LEAST_DOMAIN = 100
# A precision over fewer documents than these is luck.
LEAST_KEPT = 20
THRESHOLD_RESAMPLES = 200
CURVE_THRESHOLDS = tuple(round(0.02 * step, 2) for step in range(51))
# Rounding of shares and of qualities.
EPSILON = 1e-9
# How strongly the weights are held to sum 1 in the least squares.
SUM_WEIGHT = 1e4


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What keeping every document of at least `threshold` would do, on the held-out labels.

    share: of documents that are kept. precision: of the kept ones, how many are good by label.
    recall: of the good ones, how many are kept. Each as (value, low, high); NaN where it has no
    meaning (nothing kept, nothing good).
    """

    threshold: float
    share: Triple
    precision: Triple
    recall: Triple


@dataclass(frozen=True, slots=True)
class Calibration:
    """Weights and thresholds, and what they were chosen from.

    weights: D numbers >= 0 with sum 1, in the rubric's order. tau_drop <= tau_keep, both in 0..1.
    domains: own thresholds (tau_drop, tau_keep) by domain. target: what was asked for ("keep" or
    "precision", and "band"). good: a document is good from this label quality on. documents:
    held-out documents it was chosen on. agreement: Spearman's rank correlation of quality and label
    quality there, (value, low, high). forced: chosen although that interval reaches zero.
    intervals: (low, high) of each threshold. curve: acceptance by threshold, both thresholds among
    them. notes: what a reader should know, a sentence each.

    Raises DataError: E-HYDRA-CALIBRATION if weights or thresholds are not as said.
    """

    weights: tuple[float, ...]
    tau_drop: float
    tau_keep: float
    domains: dict[str, tuple[float, float]] = field(default_factory=dict)
    target: dict[str, float] = field(default_factory=dict)
    good: float = GOOD
    documents: int = 0
    agreement: Triple = (float("nan"), float("nan"), float("nan"))
    forced: bool = False
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        weights = np.array(self.weights, np.float64)
        usable = weights.size and bool((weights >= 0).all()) and abs(weights.sum() - 1) < 1e-6
        pairs = [(self.tau_drop, self.tau_keep), *self.domains.values()]
        if not usable or not all(0 <= drop <= keep <= 1 for drop, keep in pairs):
            raise DataError(
                "E-HYDRA-CALIBRATION",
                f"weights {self.weights} and thresholds {pairs} are not a calibration",
                "weights are >= 0 with sum 1, and 0 <= tau_drop <= tau_keep <= 1; calibrate again",
            )

    def quality(self, scores: FloatArray) -> Float64Array:
        """Returns the quality [N] in 0..1 of scores [N, D] in 0..5."""
        return _quality(scores, np.array(self.weights))

    def thresholds(self, domain: str | None = None) -> tuple[float, float]:
        """Returns (tau_drop, tau_keep) of a domain, or those of all if it has none of its own."""
        return self.domains.get(domain or "", (self.tau_drop, self.tau_keep))

    def to_json(self) -> dict[str, Any]:
        """Returns what head.json holds, NaN as null."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Calibration":
        """Returns what `to_json` gave. Raises KeyError, TypeError or DataError if it is not."""
        names = ("share", "precision", "recall")
        curve = (
            CurvePoint(point["threshold"], *(_triple(point[name]) for name in names))
            for point in content["curve"]
        )
        parsed = {
            "weights": tuple(content["weights"]),
            "domains": _pairs(content["domains"]),
            "agreement": _triple(content["agreement"]),
            "intervals": _pairs(content["intervals"]),
            "curve": tuple(curve),
            "notes": tuple(content["notes"]),
        }
        return cls(**{**content, **parsed})


def _pairs(content: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    return {name: (first, second) for name, (first, second) in content.items()}


def _triple(values: list[float | None]) -> Triple:
    value, low, high = (float("nan") if number is None else float(number) for number in values)
    return value, low, high


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out documents with labels.

    probe: the probe's scores [N, D]. judge: the judge head's, or the probe's again if there is
    none. labels: [N, D]. weights: what each document stands for, [N] > 0. domains: N names.
    """

    probe: FloatArray
    judge: FloatArray
    labels: FloatArray
    weights: Float64Array
    domains: Sequence[str]


@dataclass(frozen=True, slots=True)
class Target:
    """What the thresholds shall do; one of keep and precision is given.

    keep: the share of the corpus to keep, in (0, 1). precision: the share of kept documents that
    are good, in (0, 1]. good: from this label quality on. band: the share of the corpus between the
    thresholds, in [0, 1). weights: of the dimensions, chosen by the user; None fits them.
    by_domain: own thresholds for each domain of at least `least_domain` documents.

    Raises DataError: E-ARGUMENT if that is not so.
    """

    keep: float | None = None
    precision: float | None = None
    good: float = GOOD
    band: float = BAND
    weights: tuple[float, ...] | None = None
    by_domain: bool = False
    least_domain: int = LEAST_DOMAIN

    def __post_init__(self) -> None:
        problems = {
            "give either a share to keep or a precision": (self.keep is None)
            == (self.precision is None),
            f"a share to keep of {self.keep}": self.keep is not None and not 0 < self.keep < 1,
            f"a precision of {self.precision}": self.precision is not None
            and not 0 < self.precision <= 1,
            f"a good quality of {self.good}": not 0 <= self.good <= 1,
            f"a band of {self.band}": not 0 <= self.band < 1,
            f"weights {self.weights}": self.weights is not None
            and not (min(self.weights) >= 0 < sum(self.weights) < np.inf),
        }
        for what, wrong in problems.items():
            if wrong:
                raise DataError("E-ARGUMENT", what, "shares lie between 0 and 1, weights are >= 0")


def calibrate(
    held_out: HeldOut, target: Target, *, force: bool = False, seed: int = 0
) -> Calibration:
    """Chooses weights and thresholds on held-out labels (see the head of this module).

    force: go on although the heads do not agree with the labels. seed: of the resamples.

    Raises DataError: E-HYDRA-NO-AGREEMENT if the interval of the rank correlation between quality
    and label quality is not above zero and `force` is not set; E-HYDRA-TARGET if no threshold
    reaches the precision; E-ARGUMENT if weights do not fit the rubric.
    """
    weights = _weights_of(held_out, target)
    told = _equal(weights) if target.weights is None else weights
    label_quality = _quality(held_out.labels, told)
    probe, final = _quality(held_out.probe, weights), _quality(held_out.judge, weights)
    found = agreement(final, label_quality, seed=seed)["spearman"]
    if not (found.is_positive or force):
        raise _no_agreement(found)
    good = label_quality >= target.good - EPSILON
    documents = _Documents(probe, final, good, held_out.weights, np.ones(len(final)))
    tau_drop, tau_keep = documents.thresholds(target)
    domains, notes = _domain_thresholds(documents, held_out.domains, target)
    return Calibration(
        weights=tuple(float(weight) for weight in weights),
        tau_drop=tau_drop,
        tau_keep=tau_keep,
        domains=domains,
        target=_target_json(target),
        good=target.good,
        documents=len(final),
        agreement=(found.value, found.low, found.high),
        forced=not found.is_positive,
        intervals=documents.intervals(target, seed),
        curve=documents.curve(sorted({*CURVE_THRESHOLDS, tau_drop, tau_keep}), seed),
        notes=tuple(notes),
    )


def _no_agreement(found: Estimate) -> DataError:
    return DataError(
        "E-HYDRA-NO-AGREEMENT",
        f"the heads do not agree with the held-out labels: rank correlation {found}",
        "label more documents or use a better encoder; --force calibrates all the same",
    )


def _equal(weights: Float64Array) -> Float64Array:
    return np.full(len(weights), 1 / len(weights))


def _quality(scores: FloatArray, weights: Float64Array) -> Float64Array:
    return np.clip(scores @ weights / HIGHEST_SCORE, 0.0, 1.0)


def _weights_of(held_out: HeldOut, target: Target) -> Float64Array:
    dimensions = held_out.labels.shape[1]
    if target.weights is not None:
        if len(target.weights) != dimensions:
            what = f"{len(target.weights)} weights for {dimensions} dimensions"
            raise DataError("E-ARGUMENT", what, "give one for each dimension of the rubric")
        return np.array(target.weights, np.float64) / sum(target.weights)
    return fit_weights(held_out.judge, held_out.labels, held_out.weights)


def fit_weights(
    predicted: FloatArray, labels: FloatArray, document_weights: Float64Array
) -> Float64Array:
    """Returns the D weights >= 0 with sum 1 whose mean of `predicted` [N, D] is nearest to the mean
    of `labels` [N, D], in the least squares weighted by `document_weights` [N]."""
    roots = np.sqrt(document_weights / document_weights.sum())[:, None]
    rows = np.vstack([roots * predicted, np.full((1, predicted.shape[1]), SUM_WEIGHT)])
    wanted = np.append(roots[:, 0] * labels.mean(axis=1), SUM_WEIGHT)
    weights, _ = nnls(rows, wanted)
    return np.asarray(weights / weights.sum())


def _target_json(target: Target) -> dict[str, float]:
    wanted = {"keep": target.keep, "precision": target.precision, "band": target.band}
    return {name: value for name, value in wanted.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Documents:
    """Qualities by the probe and by the last head, what is good by label, weights, and how often
    each was drawn (once, but for resamples); [N] each."""

    probe: Float64Array
    final: Float64Array
    good: BoolArray
    weights: Float64Array
    drawn: Float64Array

    def chosen(self, rows: BoolArray) -> "_Documents":
        return _Documents(*(getattr(self, name)[rows] for name in self.__slots__))

    def resample(self, multiplicities: Float64Array) -> "_Documents":
        drawn = replace(self, weights=self.weights * multiplicities, drawn=multiplicities)
        return drawn.chosen(multiplicities > 0)

    def thresholds(self, target: Target) -> tuple[float, float]:
        """Returns (tau_drop, tau_keep)."""
        if target.keep is not None:
            tau_keep = share_threshold(self.final, self.weights, target.keep - target.band / 2)
            left = target.keep + target.band / 2
        else:
            assert target.precision is not None
            tau_keep = self._precise_threshold(target.precision)
            kept = self.weights[self.final >= tau_keep].sum() / self.weights.sum()
            left = kept + target.band
        tau_drop = share_threshold(self.final, self.weights, left)
        return min(tau_drop, self._least_probe(tau_keep), tau_keep), tau_keep

    def _precise_threshold(self, precision: float) -> float:
        """Returns the smallest threshold from which on `precision` of the documents are good."""
        order = np.argsort(-self.final, kind="stable")
        quality, weights = self.final[order], self.weights[order]
        shares = np.cumsum(weights * self.good[order]) / np.cumsum(weights)
        # Documents of equal quality go together.
        last = np.append(quality[1:] < quality[:-1], True)
        counts = np.cumsum(self.drawn[order])
        counted = last & (counts >= min(LEAST_KEPT, counts[-1]))
        reached = np.flatnonzero(counted & (shares >= precision - EPSILON))
        if not len(reached):
            best = np.flatnonzero(counted)[np.argmax(shares[counted])]
            raise DataError(
                "E-HYDRA-TARGET",
                f"no threshold makes {precision:.0%} of the kept documents good; the best is "
                f"{shares[best]:.0%} from {quality[best]:.3f} on",
                "ask for less, lower --good, or label more documents",
            )
        return float(quality[reached[-1]])

    def _least_probe(self, tau_keep: float) -> float:
        """Returns a threshold below which the probe drops few of what the last head keeps."""
        kept = self.final >= tau_keep
        if not kept.any():
            return tau_keep
        return share_threshold(self.probe[kept], self.weights[kept], 1 - MOST_LOST)

    def intervals(self, target: Target, seed: int) -> dict[str, tuple[float, float]]:
        """Returns the bootstrap interval (low, high) of each threshold."""
        drawn = []
        for piece in resampled(len(self.final), THRESHOLD_RESAMPLES, seed):
            for multiplicities in piece:
                found = self.resample(multiplicities)
                try:
                    drawn.append(found.thresholds(target))
                except DataError:
                    # No threshold reaches the precision, so nothing is kept: to leave such
                    # resamples out would move the interval down.
                    left = share_threshold(found.final, found.weights, target.band)
                    drawn.append((left, 1.0))
        low, high = np.percentile(drawn, [50 * (1 - LEVEL), 50 * (1 + LEVEL)], axis=0)
        names = ("tau_drop", "tau_keep")
        return {name: (float(low[at]), float(high[at])) for at, name in enumerate(names)}

    def curve(self, thresholds: Sequence[float], seed: int) -> tuple[CurvePoint, ...]:
        """Returns what each threshold keeps, with 95 % intervals."""
        kept = (self.final[:, None] >= np.array(thresholds)).astype(np.float64)
        good = self.good.astype(np.float64)
        whole = _rates(self.weights[None], kept, good)
        parts = [
            _rates(m * self.weights, kept, good)
            for m in resampled(len(self.final), RESAMPLES, seed)
        ]
        drawn = np.concatenate(parts, axis=1)
        points = []
        for at, threshold in enumerate(thresholds):
            triples = [_with_interval(whole[k, 0, at], drawn[k, :, at]) for k in range(3)]
            points.append(CurvePoint(float(threshold), *triples))
        return tuple(points)


def share_threshold(quality: Float64Array, weights: Float64Array, share: float) -> float:
    """Returns a threshold from which on about `share` of the weight of documents lies.

    quality, weights: [N]. It is the quality of the document at which the share is reached, counted
    from the best; 1 for no share at all, 0 for all. A larger share never has a larger threshold.
    """
    if share <= EPSILON:
        return 1.0
    if share >= 1 - EPSILON:
        return 0.0
    order = np.argsort(-quality, kind="stable")
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, share * reached[-1] - EPSILON))
    return float(quality[order[min(at, len(order) - 1)]])


def _rates(m: Float64Array, kept: Float64Array, good: Float64Array) -> Float64Array:
    """Returns share, precision and recall [3, R, T] for weights m [R, N] and kept [N, T]."""
    all_kept, good_kept = m @ kept, (m * good) @ kept
    with np.errstate(invalid="ignore"):
        share = all_kept / m.sum(axis=1, keepdims=True)
        precision = good_kept / all_kept
        recall = good_kept / (m @ good)[:, None]
    return np.stack([share, precision, recall])


def _with_interval(value: float, drawn: Float64Array) -> Triple:
    known = drawn[np.isfinite(drawn)]
    if not np.isfinite(value) or not len(known):
        return float("nan"), float("nan"), float("nan")
    low, high = np.percentile(known, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(value), float(low), float(high)


def _domain_thresholds(
    documents: _Documents, domains: Sequence[str], target: Target
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Returns own thresholds by domain, and a sentence for each that falls back to those of all."""
    own: dict[str, tuple[float, float]] = {}
    notes: list[str] = []
    if not target.by_domain:
        return own, notes
    names = np.array(domains)
    for name in sorted(set(domains)):
        part = documents.chosen(names == name)
        if len(part.final) < target.least_domain:
            notes.append(
                f"{name} has {len(part.final)} held-out documents, below {target.least_domain}: "
                "it uses the thresholds of all"
            )
            continue
        try:
            own[name] = part.thresholds(target)
        except DataError as error:
            notes.append(f"{name} uses the thresholds of all: {error}")
    return own, notes
