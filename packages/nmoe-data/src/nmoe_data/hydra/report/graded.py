"""The test part of the labels beside what the heads say of it: the one input of all measures.

The split of a document follows from its id alone, so no document of this part was in training or in
calibration, on whichever labels the heads were trained.

Letters: N documents, D dimensions of the rubric.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nmoe_data.errors import DataError
from nmoe_data.hydra.calibrate import HIGHEST_SCORE, Calibration
from nmoe_data.hydra.documents import domain_of
from nmoe_data.hydra.encoder import open_encoder
from nmoe_data.hydra.filter.decide import KEEP, OPEN, PROBE, Decisions, decide
from nmoe_data.hydra.heads import Heads
from nmoe_data.hydra.labels import Labels

Floats = npt.NDArray[np.float64]

TEST = "test"
QUALITY_DIGITS = 9
PROBE_HEAD, JUDGE_HEAD = "probe", "judge"


@dataclass(frozen=True, slots=True)
class Graded:
    """Test documents with labels and predictions.

    texts, domains, strata: N. labels: [N, D] in 0..5. predictions: by head, [N, D]. qualities: by
    head, [N] in 0..1; label_quality: [N]. bands: of each document, "drop", "band" or "keep" by the
    head that speaks last; spared: whether the probe alone had dropped it. calibrated: False if the
    heads have no calibration; quality is then the plain mean, and bands are empty.
    """

    texts: list[str]
    domains: list[str]
    strata: list[str]
    labels: Floats
    predictions: dict[str, Floats]
    qualities: dict[str, Floats]
    label_quality: Floats
    bands: list[str]
    spared: npt.NDArray[np.bool_]
    calibrated: bool

    @property
    def final(self) -> str:
        """The head that speaks last."""
        return JUDGE_HEAD if JUDGE_HEAD in self.predictions else PROBE_HEAD


def grade_test_part(labels: Labels, heads: Heads, device: str = "cpu") -> Graded:
    """Returns the test documents of `labels` with the scores of both heads.

    Raises DataError: E-HYDRA-REPORT if the heads were trained by another rubric or the test part
    holds no scored document, and those of `open_encoder`.
    """
    if labels.rubric.hash != heads.rubric.hash:
        raise DataError(
            "E-HYDRA-REPORT",
            f"the heads were trained by the rubric {heads.rubric.name} "
            f"({heads.rubric.hash[:16]}), {labels.path} holds labels by {labels.rubric.name} "
            f"({labels.rubric.hash[:16]})",
            "report on labels by the same rubric",
        )
    scored = labels.scores()
    chosen = [i for i, split in enumerate(scored.splits) if split == TEST]
    if not chosen:
        raise DataError(
            "E-HYDRA-REPORT",
            f"no scored document of {labels.path} is in the test part",
            "label more documents",
        )
    texts = [scored.texts[i] for i in chosen]
    strata = [scored.strata[i] for i in chosen]
    domains = [domain_of(stratum) for stratum in strata]
    encoder = open_encoder(heads.encoder_spec, device=device)
    heads.check_encoder(encoder)
    features = encoder.encode(texts)
    predictions = {PROBE_HEAD: heads.probe_scores(features).astype(np.float64)}
    if heads.has_judge:
        judged = heads.judge_texts(encoder, texts, features)
        predictions[JUDGE_HEAD] = judged.astype(np.float64)
    calibration = heads.calibration
    weights = _weights(calibration, len(heads.rubric.dimensions))
    true = scored.scores[chosen].astype(np.float64)
    made = None if calibration is None else decide(heads, calibration, encoder, texts, domains)
    return Graded(
        texts=texts,
        domains=domains,
        strata=strata,
        labels=true,
        predictions=predictions,
        qualities={name: _quality(scores, weights) for name, scores in predictions.items()},
        label_quality=_quality(true, weights),
        bands=[] if made is None else _bands(made),
        spared=np.array([] if made is None else _spared(made, heads.has_judge), bool),
        calibrated=calibration is not None,
    )


def _weights(calibration: Calibration | None, dimensions: int) -> Floats:
    if calibration is None:
        return np.full(dimensions, 1 / dimensions)
    return np.array(calibration.weights)


def _quality(scores: Floats, weights: Floats) -> Floats:
    """Returns qualities without the last digits, in which equal sums would differ by rounding."""
    return np.clip(scores @ weights / HIGHEST_SCORE, 0.0, 1.0).round(QUALITY_DIGITS)


def _bands(made: Decisions) -> list[str]:
    return ["band" if each == OPEN else each for each in made.decision]


def _spared(made: Decisions, has_judge: bool) -> list[bool]:
    """Returns which documents a judge head did not have to read; without one, none was spared."""
    pairs = zip(made.decision, made.decided_by, strict=True)
    return [has_judge and by == PROBE and each != KEEP for each, by in pairs]
