"""The numbers of a report, as what JSON can hold: agreement, bias, injection, compute, acceptance.

Every estimate comes with its 95 % bootstrap interval over documents, and where it has no meaning
with the reason. A correlation whose interval reaches zero is "no agreement", in these words.

Letters: N documents, D dimensions of the rubric.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from nmoe_data.hydra.agreement import Estimate, agreement, estimates
from nmoe_data.hydra.calibrate import Calibration
from nmoe_data.hydra.report.graded import Floats, Graded

F1_THRESHOLDS = (2.0, 3.0, 4.0)
QUALITY_SCALE = 5.0
AGREES, NO_AGREEMENT, UNKNOWN = "agreement", "no agreement", "cannot be told"
EXAMPLES = 4
EXCERPT = 1200


def agreement_section(graded: Graded, names: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Returns an entry per head and dimension, and one for quality (times 5, to share its scale).

    verdict: "agreement" if Spearman's interval lies above zero.
    """
    entries = []
    for head, scores in graded.predictions.items():
        pairs = [(name, scores[:, at], graded.labels[:, at]) for at, name in enumerate(names)]
        quality = graded.qualities[head] * QUALITY_SCALE
        pairs.append(("quality", quality, graded.label_quality * QUALITY_SCALE))
        for name, predicted, labelled in pairs:
            found = agreement(predicted, labelled, thresholds=F1_THRESHOLDS, seed=seed)
            entries.append(
                {
                    "head": head,
                    "dimension": name,
                    "documents": len(labelled),
                    "verdict": verdict(found["spearman"]),
                    **{key: estimate.to_json() for key, estimate in found.items()},
                }
            )
    return entries


def verdict(estimate: Estimate) -> str:
    """Returns in words whether a correlation is there."""
    if estimate.reason:
        return UNKNOWN
    return AGREES if estimate.is_positive else NO_AGREEMENT


def length_section(graded: Graded, seed: int) -> list[dict[str, Any]]:
    """Returns rank correlations with the length in characters: of labels, scores and errors."""
    length = np.array([len(text) for text in graded.texts], np.float64)
    predicted = graded.qualities[graded.final]
    measured = {
        "label": graded.label_quality,
        "prediction": predicted,
        "error": predicted - graded.label_quality,
        "size of error": np.abs(predicted - graded.label_quality),
    }
    entries = []
    for name, values in measured.items():
        found = agreement(values, length, seed=seed)["spearman"]
        entries.append({"of": name, "spearman": found.to_json()})
    return entries


def domain_section(graded: Graded, seed: int) -> list[dict[str, Any]]:
    """Returns the mean error of quality (prediction minus label) in each domain and stratum."""
    error = graded.qualities[graded.final] - graded.label_quality
    entries = []
    for kind, groups in (("domain", graded.domains), ("stratum", graded.strata)):
        for name in sorted(set(groups)):
            inside = error[[group == name for group in groups]]
            entries.append(
                {
                    "kind": kind,
                    "name": name,
                    "documents": len(inside),
                    "mean_error": mean_estimate(inside, seed).to_json(),
                }
            )
    return entries


def mean_estimate(values: Floats, seed: int) -> Estimate:
    """Returns the mean of N values with its interval; NaN with a reason for fewer than two."""
    if len(values) < 2:
        nan = float("nan")
        return Estimate(nan, nan, nan, f"only {len(values)} documents")

    def mean(m: Floats) -> Floats:
        return m @ values / m.sum(axis=1)

    return estimates({"mean": mean}, len(values), seed=seed)["mean"]


def compute_section(graded: Graded, calibration: Calibration | None) -> dict[str, Any] | None:
    """Returns what the probe spares the judge head on the test part, and what that costs.

    None without a calibration, or without a judge head to spare.
    """
    if calibration is None or len(graded.predictions) < 2:
        return None
    good = graded.label_quality >= calibration.good
    spared = graded.spared
    return {
        "documents": len(spared),
        "spared": float(spared.mean()),
        "good_among_spared": float(good[spared].mean()) if spared.any() else None,
        "good_lost": float((good & spared).sum() / good.sum()) if good.any() else None,
    }


def acceptance_section(calibration: Calibration | None) -> dict[str, Any] | None:
    """Returns thresholds and the acceptance curve, None if the heads are not calibrated."""
    return None if calibration is None else calibration.to_json()


def band_section(graded: Graded) -> list[dict[str, Any]]:
    """Returns for each band its share of the test part and the mean quality of its labels."""
    counts = Counter(graded.bands)
    bands = np.array(graded.bands)
    return [
        {
            "band": name,
            "documents": counts[name],
            "mean_label_quality": float(graded.label_quality[bands == name].mean())
            if counts[name]
            else None,
        }
        for name in ("drop", "band", "keep")
        if graded.calibrated
    ]


def example_section(graded: Graded, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns documents of each band: the plainest ones first, then those most in error."""
    entries = []
    quality = graded.qualities[graded.final]
    error = np.abs(quality - graded.label_quality)
    for name in ("drop", "band", "keep"):
        inside = [i for i, band in enumerate(graded.bands) if band == name]
        by_error = sorted(inside, key=lambda i: float(error[i]))
        chosen = dict.fromkeys([*by_error[: EXAMPLES // 2], *by_error[::-1][: EXAMPLES // 2]])
        for i in chosen:
            scores = graded.predictions[graded.final][i]
            entries.append(
                {
                    "band": name,
                    "domain": graded.domains[i],
                    "characters": len(graded.texts[i]),
                    "text": graded.texts[i][:EXCERPT],
                    "quality": float(quality[i]),
                    "label_quality": float(graded.label_quality[i]),
                    "scores": dict(zip(names, scores.tolist(), strict=True)),
                    "labels": dict(zip(names, graded.labels[i].tolist(), strict=True)),
                }
            )
    return entries
