"""Calibrates a HEADS folder on the validation part of a LABELS folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nmoe_data.errors import DataError
from nmoe_data.hydra.calibrate import Calibration, HeldOut, Target, calibrate
from nmoe_data.hydra.documents import domain_of
from nmoe_data.hydra.embeddings import EmbeddingCache, encode_all
from nmoe_data.hydra.encoder.contract import Encoder
from nmoe_data.hydra.heads import Heads, save_heads
from nmoe_data.hydra.labels import Labels

HELD_OUT_SPLIT = "validation"
LEAST_DOCUMENTS = 10


def calibrate_heads(
    folder: Path,
    heads: Heads,
    labels: Labels,
    encoder: Encoder,
    target: Target,
    *,
    force: bool = False,
    embeddings: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Chooses weights and thresholds on held-out labels and writes them to head.json in `folder`.

    heads: those of `folder`. embeddings: a folder that keeps features. progress: called with the
    documents encoded and their number; may raise to stop, and the folder stays as it is.
    Raises DataError: E-HYDRA-RUBRIC if labels and heads have not the same rubric, E-HYDRA-TOO-FEW,
    E-HYDRA-ENCODER, and those of `calibrate`.
    """
    if labels.rubric.hash != heads.rubric.hash:
        raise DataError(
            "E-HYDRA-RUBRIC",
            f"the heads learned the rubric {heads.rubric.name} ({heads.rubric.hash[:16]}), the "
            f"labels are by {labels.rubric.name} ({labels.rubric.hash[:16]})",
            "name the labels that the heads were trained on, or train again",
        )
    heads.check_encoder(encoder)
    held_out = held_out_scores(heads, labels, encoder, embeddings, progress)
    calibration = calibrate(held_out, target, force=force, seed=heads.info["seed"])
    save_heads(folder, replace(heads, calibration=calibration))
    return calibration


def held_out_scores(
    heads: Heads,
    labels: Labels,
    encoder: Encoder,
    embeddings: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HeldOut:
    """Returns labels of the validation part and what the heads say about it.

    Raises DataError: E-HYDRA-TOO-FEW.
    """
    documents = labels.scores(heads.info["model"])
    rows = [row for row, split in enumerate(documents.splits) if split == HELD_OUT_SPLIT]
    if len(rows) < LEAST_DOCUMENTS:
        raise DataError(
            "E-HYDRA-TOO-FEW",
            f"{len(rows)} scored documents are held out, at least {LEAST_DOCUMENTS} are needed",
            "label a larger sample",
        )
    texts = [documents.texts[row] for row in rows]
    if embeddings is None:
        features = encode_all(encoder, texts, progress)
    else:
        cache = EmbeddingCache(embeddings, encoder)
        features = cache.features([documents.ids[row] for row in rows], texts, progress)
    probe = heads.probe_scores(features)
    return HeldOut(
        probe=probe,
        judge=heads.judge_texts(encoder, texts, features) if heads.has_judge else probe,
        labels=documents.scores[rows],
        weights=documents.weights[rows],
        domains=[domain_of(documents.strata[row]) for row in rows],
    )
