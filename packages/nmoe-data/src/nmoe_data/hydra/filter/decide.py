"""Who decides about a document, and how: the probe, the judge head, the judge itself, the band.

Below tau_drop the probe drops. What is left goes to the judge head if there is one, else the
probe's own quality counts: from tau_keep on it is kept, below tau_drop dropped. Between lies the
band: open until the judge, or the rule for what the judge did not score, closes it.

Letters: N documents, D dimensions of the rubric.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nmoe_data.hydra.calibrate import Calibration
from nmoe_data.hydra.encoder import Encoder
from nmoe_data.hydra.heads import Heads

KEEP, DROP, OPEN = "keep", "drop", "open"
PROBE, JUDGE, LLM, BAND = "probe", "judge", "llm", "band"

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Decisions:
    """What the heads say about N documents.

    probe_quality [N]; judge_quality [N], NaN where the judge head was not asked; scores [N, D] and
    quality [N] of the head that spoke last; decision: KEEP, DROP or OPEN; decided_by: PROBE, JUDGE
    or BAND.
    """

    probe_quality: Floats
    judge_quality: Floats
    scores: Floats
    quality: Floats
    decision: list[str]
    decided_by: list[str]


def decide(
    heads: Heads,
    calibration: Calibration,
    encoder: Encoder,
    texts: Sequence[str],
    domains: Sequence[str],
) -> Decisions:
    """Returns the heads' decisions on texts; domains: of each, for thresholds of its own."""
    taus = np.array([calibration.thresholds(domain) for domain in domains]).reshape(-1, 2)
    tau_drop, tau_keep = taus[:, 0], taus[:, 1]
    features = encoder.encode(texts)
    scores = heads.probe_scores(features)
    quality = calibration.quality(scores)
    probe_quality = quality.astype(np.float32)
    judge_quality = np.full(len(texts), np.nan, np.float32)
    by = np.full(len(texts), PROBE, object)
    left = np.flatnonzero(quality >= tau_drop).tolist()
    if heads.has_judge and left:
        judged = heads.judge_texts(encoder, [texts[i] for i in left], features[left])
        scores[left] = judged
        quality[left] = calibration.quality(judged)
        judge_quality[left] = quality[left]
        by[left] = JUDGE
    is_open = (quality >= tau_drop) & (quality < tau_keep)
    by[is_open] = BAND
    decision = np.where(is_open, OPEN, np.where(quality >= tau_keep, KEEP, DROP))
    return Decisions(
        probe_quality,
        judge_quality,
        scores,
        quality.astype(np.float32),
        decision.tolist(),
        by.tolist(),
    )
