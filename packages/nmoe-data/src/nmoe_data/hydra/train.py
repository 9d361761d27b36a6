"""From labels to heads: encode, fit the probe by ridge regression, train the judge head, measure.

Documents go to train, validation or test by the hash of their text (`documents.split_of`), so equal
texts never stand on both sides. The validation part chooses the probe's regularisation and when the
judge stops; the test part is used once, for the metrics.

The probe is a ridge regression per dimension, on standardised features if they are dense; the scale
is then folded into the weight. Sparse features are made to be of one scale and stay sparse.

Letters: N documents, W width of the features, P of the projection, D dimensions of the rubric.
"""

import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import eigh
from scipy.sparse import csr_array, issparse

import nmoe_data
from nmoe_data.errors import DataError
from nmoe_data.files import os_errors
from nmoe_data.hydra.agreement import agreement
from nmoe_data.hydra.documents import SPLITS
from nmoe_data.hydra.embeddings import EmbeddingCache, encode_all
from nmoe_data.hydra.encoder.contract import Encoder, FloatArray, FloatMatrix, TokenEncoder
from nmoe_data.hydra.extras import extra
from nmoe_data.hydra.heads import (
    HEAD_NAME,
    POOLED,
    TOKENS,
    Heads,
    JudgeHead,
    PooledJudge,
    Probe,
    save_heads,
)
from nmoe_data.hydra.labels import Labels, ScoredDocuments
from nmoe_data.hydra.ridge import ridge_path

LEAST_DOCUMENTS = {"train": 20, "validation": 10, "test": 10}
ALPHAS = tuple(float(alpha) for alpha in 10.0 ** np.arange(-2.0, 5.5, 0.5))
PROJECTED = 128
PROJECTION_DOCUMENTS = 4096
# Directions of less than this share of the largest are noise.
SMALLEST_DIRECTION = 1e-6
QUALITY = "quality"
logger = logging.getLogger("nmoe_data")


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """How far a training is: `done` of `total` in this stage ("encode", "probe", "judge",
    "measure"), and a detail for people."""

    stage: str
    done: int
    total: int
    detail: str = ""


Progress = Callable[[TrainProgress], None]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What to train.

    judge: "mlp", "transformer", or None for the probe alone. model: learn one judge's scores alone;
    None takes the mean of all. seed: of the judge head. embeddings: a folder that keeps features.
    max_tokens: of a document that a transformer reads. device: where the judge head is trained.
    """

    judge: str | None = POOLED
    model: str | None = None
    seed: int = 0
    embeddings: Path | None = None
    max_tokens: int = 256
    device: str = "cpu"


def train_heads(
    labels: Labels,
    encoder: Encoder,
    out: Path,
    settings: TrainSettings,
    progress: Progress | None = None,
) -> Heads:
    """Trains heads on labels and writes the HEADS folder `out`.

    progress: called often; may raise to stop, and nothing but cached embeddings is left behind.
    Raises DataError: E-HYDRA-TOO-FEW if a part has too few scored documents, E-OUT-NOT-EMPTY,
    E-HYDRA-ENCODER if a transformer is asked for and the encoder has no token states,
    E-HYDRA-EXTRA, and those of `Labels.scores`, of the encoder and of `save_heads`.
    """
    report = progress or (lambda now: None)
    _check_out(out)
    documents = labels.scores(settings.model)
    rows = {split: _rows(documents, split) for split in SPLITS}
    _check_enough(rows)
    if settings.judge == TOKENS and not isinstance(encoder, TokenEncoder):
        raise DataError(
            "E-HYDRA-ENCODER",
            f"{encoder.name} gives no token states for a transformer",
            "use an hf or causal encoder, or --judge mlp",
        )
    features = _features(documents, encoder, settings, report)
    probe, alphas = fit_probe(features, documents.scores, rows, report)
    judge, training = _train_judge(documents, features, probe, encoder, rows, settings, report)
    heads = Heads(labels.rubric, encoder.name, encoder.hash, encoder.width, probe, judge)
    info = {
        "tool": f"nmoe-data {nmoe_data.__version__}",
        "seed": settings.seed,
        "model": settings.model,
        "models": labels.models,
        "documents": {split: len(found) for split, found in rows.items()},
        "probe": {"alphas": dict(zip(labels.rubric.names, alphas, strict=True))},
        "training": training,
        "metrics": _measure(heads, encoder, documents, features, rows, report),
    }
    return save_heads(out, replace(heads, info=info))


def _check_out(out: Path) -> None:
    """Refuses a place for heads that cannot be written, before hours go into them.

    A folder with something else in it is refused too; older heads are replaced.
    """
    with os_errors("write the heads in", out):
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))
        if nearest == out and any(out.iterdir()) and not (out / HEAD_NAME).is_file():
            raise DataError(
                "E-OUT-NOT-EMPTY", f"{out} holds files but no heads", "choose another folder"
            )


def _rows(documents: ScoredDocuments, split: str) -> list[int]:
    return [row for row, name in enumerate(documents.splits) if name == split]


def _check_enough(rows: dict[str, list[int]]) -> None:
    for split, least in LEAST_DOCUMENTS.items():
        if len(rows[split]) < least:
            found = ", ".join(f"{name} {len(part)}" for name, part in rows.items())
            raise DataError(
                "E-HYDRA-TOO-FEW",
                f"scored documents: {found}; {split} needs at least {least}",
                "label a larger sample (`nmoe-data hydra label --sample N`)",
            )


def _features(
    documents: ScoredDocuments,
    encoder: Encoder,
    settings: TrainSettings,
    report: Progress,
) -> FloatMatrix:
    def show(done: int, total: int) -> None:
        report(TrainProgress("encode", done, total, f"{total:,} documents"))

    if settings.embeddings is None:
        return encode_all(encoder, documents.texts, show)
    cache = EmbeddingCache(settings.embeddings, encoder)
    return cache.features(documents.ids, documents.texts, show)


def fit_probe(
    features: FloatMatrix, scores: FloatArray, rows: dict[str, list[int]], report: Progress
) -> tuple[Probe, list[float]]:
    """Fits a ridge regression per dimension, its regularisation by the validation part.

    features: [N, W]. scores: float32 [N, D]. rows: row numbers by split. Returns the probe and the
    chosen regularisation of each dimension.
    """
    train, validation = features[rows["train"]], features[rows["validation"]]
    mean, scale = (None, np.ones(1)) if issparse(train) else _standardisation(train)
    inputs = train if mean is None else (train - mean) / scale
    best_error = np.full(scores.shape[1], np.inf)
    weight = np.zeros((features.shape[1], scores.shape[1]), np.float32)
    bias = np.zeros(scores.shape[1], np.float32)
    alphas = [0.0] * scores.shape[1]
    path = ridge_path(inputs, scores[rows["train"]], ALPHAS)
    for number, (alpha, slopes, offsets) in enumerate(path, 1):
        slopes = np.asarray(slopes / scale[:, None], np.float32)
        predicted = Probe(slopes, offsets, mean).raw_scores(validation)
        error = np.square(predicted - scores[rows["validation"]]).mean(axis=0)
        for column in np.flatnonzero(error < best_error):
            best_error[column], alphas[column] = error[column], alpha
            weight[:, column], bias[column] = slopes[:, column], offsets[column]
        report(TrainProgress("probe", number, len(ALPHAS), f"validation error {error.mean():.3f}"))
    return Probe(weight, bias, mean), alphas


def _standardisation(train: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns mean and scale [W]; a feature that never changes has the scale 1."""
    deviation = train.std(axis=0)
    return train.mean(axis=0), np.where(deviation > 0, deviation, 1.0).astype(np.float32)


def _train_judge(
    documents: ScoredDocuments,
    features: FloatMatrix,
    probe: Probe,
    encoder: Encoder,
    rows: dict[str, list[int]],
    settings: TrainSettings,
    report: Progress,
) -> tuple[JudgeHead | None, dict[str, Any] | None]:
    if settings.judge is None:
        return None, None
    with extra("torch"):
        from nmoe_data.hydra.networks import Task, train_pooled, train_tokens

    def show(done: int, total: int, error: float) -> None:
        report(TrainProgress("judge", done, total, f"validation error {error:.3f}"))

    base = probe.raw_scores(features).astype(np.float32)
    labels = documents.scores
    task = Task(base, labels, rows["train"], rows["validation"], settings.seed, show)
    if settings.judge == TOKENS:
        assert isinstance(encoder, TokenEncoder)
        states = encoder.token_states(documents.texts, settings.max_tokens)
        judge, outcome = train_tokens(states, settings.max_tokens, task, settings.device)
        return judge, asdict(outcome)
    pooled = _pooled_inputs(features[rows["train"]])
    layers, outcome = train_pooled(pooled.inputs(features), task)
    return replace(pooled, layers=layers), asdict(outcome)


def _pooled_inputs(train: FloatMatrix) -> PooledJudge:
    """Returns a judge head without layers: the projection and standardisation of its inputs."""
    projection = _projection(train) if issparse(train) else None
    projected = train if projection is None else train @ projection
    return PooledJudge(projection, *_standardisation(np.asarray(projected)))


def _projection(train: csr_array) -> FloatArray:
    """Returns the leading right singular vectors [W, P] of sparse features (of some documents).

    From the eigenvectors u of X X^T with eigenvalue s^2 as X^T u / s; far cheaper than a
    decomposition of the wide matrix, and exact.
    """
    some = train[:PROJECTION_DOCUMENTS]
    count = some.shape[0]
    gram = (some @ some.T).toarray().astype(np.float64)
    span = [max(count - PROJECTED, 0), count - 1]
    eigenvalues, vectors = eigh(gram, subset_by_index=span)
    kept = eigenvalues > SMALLEST_DIRECTION * eigenvalues[-1]
    directions = vectors[:, kept] / np.sqrt(eigenvalues[kept])
    return np.ascontiguousarray(some.T @ directions, dtype=np.float32)


def _measure(
    heads: Heads,
    encoder: Encoder,
    documents: ScoredDocuments,
    features: FloatMatrix,
    rows: dict[str, list[int]],
    report: Progress,
) -> dict[str, Any]:
    """Returns the agreement by split, head, and dimension or mean of all."""
    found: dict[str, Any] = {}
    for number, split in enumerate(("validation", "test"), 1):
        chosen = rows[split]
        labels = documents.scores[chosen]
        part = features[chosen]
        predicted = {"probe": heads.probe_scores(part)}
        if heads.has_judge:
            texts = [documents.texts[row] for row in chosen]
            predicted["judge"] = heads.judge_texts(encoder, texts, part)
        found[split] = {
            name: agreement_by_dimension(scores, labels, heads.rubric.names)
            for name, scores in predicted.items()
        }
        report(TrainProgress("measure", number, 2, split))
    return found


def agreement_by_dimension(
    predicted: FloatArray, labels: FloatArray, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns `agreement` as JSON for each dimension of scores [N, D], and for their mean
    ("quality", in 0..5)."""
    columns = {name: (predicted[:, at], labels[:, at]) for at, name in enumerate(names)}
    columns[QUALITY] = (predicted.mean(axis=1), labels.mean(axis=1))
    return {
        name: {key: one.to_json() for key, one in agreement(*pair).items()}
        for name, pair in columns.items()
    }
