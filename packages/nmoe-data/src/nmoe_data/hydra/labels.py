"""The LABELS folder: the sampled documents, the labels that judges gave them, the rubric.

```
rubric.toml        the rubric, byte for byte
sample.json        sources, seed, strata with what was seen and sampled, text_field
documents.parquet  the sampled documents with their text and split
labels.parquet     a row per document and judge
label.json         judges, counts, tokens, cost
```
An unscored document is never a low score: its scores are null and its status says why.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from nmoe_data.errors import DataError
from nmoe_data.files import TEMPORARY_SUFFIX, os_errors, sync_path
from nmoe_data.hydra.documents import Document, split_of
from nmoe_data.hydra.rubric import MAX_SCORE, Rubric, load_rubric

SCHEMA_VERSION = 1
RUBRIC_NAME = "rubric.toml"
SAMPLE_NAME = "sample.json"
DOCUMENTS_NAME = "documents.parquet"
LABELS_NAME = "labels.parquet"
SUMMARY_NAME = "label.json"
CACHE_NAME = "requests.sqlite"
INJECTION_NAME = "injection.parquet"

SCORED = "scored"
REFUSED = "refused"
UNPARSABLE = "unparsable"
TOO_LONG = "too_long"
FAILED = "failed"
STATUSES = (SCORED, REFUSED, UNPARSABLE, TOO_LONG, FAILED)

VERSION_METADATA = {b"schema_version": str(SCHEMA_VERSION).encode()}
DOCUMENTS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.large_string()),
        ("source", pa.string()),
        ("offset", pa.int64()),
        ("stratum", pa.string()),
        ("split", pa.string()),
    ],
    metadata=VERSION_METADATA,
)
LABELS_SCHEMA = pa.schema(
    [
        ("document_id", pa.string()),
        ("rubric_hash", pa.string()),
        ("model", pa.string()),
        ("prompt_hash", pa.string()),
        ("scores", pa.list_(pa.int8())),
        ("expected", pa.list_(pa.float32())),
        ("reason", pa.string()),
        ("status", pa.string()),
        ("detail", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("cost", pa.float64()),
        ("latency_s", pa.float64()),
        ("attempts", pa.int32()),
    ],
    metadata=VERSION_METADATA,
)


@dataclass(frozen=True, slots=True)
class Label:
    """What one judge made of one document; a row of labels.parquet.

    scores: integers 0 to 5 in the rubric's order, None if unscored. expected: their means under
    the judge's own probabilities, None without log-probabilities. reason: the judge's sentence, ""
    if unscored. status: one of STATUSES. detail: the failure class under its own name, "" if
    scored. prompt_tokens, completion_tokens, cost: of all its paid requests. latency_s: of the
    last one, seconds. attempts: requests sent, refused and failed ones too.
    """

    document_id: str
    rubric_hash: str
    model: str
    prompt_hash: str
    scores: tuple[int, ...] | None
    expected: tuple[float, ...] | None
    reason: str
    status: str
    detail: str
    prompt_tokens: int
    completion_tokens: int
    cost: float
    latency_s: float
    attempts: int


@dataclass(frozen=True, slots=True)
class ScoredDocuments:
    """Documents with at least one score, N of them, D dimensions.

    scores: float32 [N, D], the mean over judges. weights: float64 [N], how many documents of the
    corpus each stands for (seen over scored of its stratum).
    """

    ids: list[str]
    texts: list[str]
    strata: list[str]
    splits: list[str]
    scores: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Labels:
    """What a LABELS folder holds.

    documents, labels: tables by DOCUMENTS_SCHEMA and LABELS_SCHEMA. sample, summary: sample.json
    and label.json.
    """

    path: Path
    rubric: Rubric
    documents: pa.Table
    labels: pa.Table
    sample: dict[str, Any]
    summary: dict[str, Any]

    @property
    def models(self) -> list[str]:
        """The judges' models, sorted."""
        return sorted(self.labels["model"].unique().to_pylist())

    def scores(self, model: str | None = None) -> ScoredDocuments:
        """Returns the documents with scores, in the order of documents.parquet.

        model: one judge's alone; None takes the mean over the judges that scored a document. A
        judge's expected scores count where it gave them. Documents without any score are left out.

        Raises DataError: E-HYDRA-LABELS if there is no such model, or no score at all.
        """
        if model is not None and model not in self.models:
            known = ", ".join(self.models)
            raise _problem(self.path, f"holds no labels of {model} (there are {known})")
        means = self._mean_scores(model)
        if not means:
            raise _problem(self.path, "holds no scored document")
        kept = [row for row in self.documents.to_pylist() if row["id"] in means]
        strata = [row["stratum"] for row in kept]
        return ScoredDocuments(
            ids=[row["id"] for row in kept],
            texts=[row["text"] for row in kept],
            strata=strata,
            splits=[row["split"] for row in kept],
            scores=np.array([means[row["id"]] for row in kept], np.float32),
            weights=self._weights(strata),
        )

    def _mean_scores(self, model: str | None) -> dict[str, npt.NDArray[np.float64]]:
        by_document: dict[str, list[list[float]]] = {}
        columns = ("document_id", "model", "scores", "expected")
        for row in self.labels.select(columns).to_pylist():
            if row["scores"] is not None and model in (None, row["model"]):
                values = row["scores"] if row["expected"] is None else row["expected"]
                by_document.setdefault(row["document_id"], []).append(values)
        return {id: np.mean(values, axis=0) for id, values in by_document.items()}

    def _weights(self, strata: list[str]) -> npt.NDArray[np.float64]:
        seen = {name: counts["seen"] for name, counts in self.sample["strata"].items()}
        scored = {name: strata.count(name) for name in set(strata)}
        return np.array([seen[name] / scored[name] for name in strata], np.float64)


def write_documents(folder: Path, documents: Sequence[Document]) -> None:
    """Writes documents.parquet atomically.

    Raises OSError as the operating system reports it.
    """
    rows = [{**asdict(document), "split": split_of(document.id)} for document in documents]
    write_table(folder / DOCUMENTS_NAME, pa.Table.from_pylist(rows, DOCUMENTS_SCHEMA))


def read_sampled(folder: Path) -> list[Document]:
    """Returns the documents in documents.parquet.

    Raises DataError: E-HYDRA-LABELS, or those of `os_errors`.
    """
    rows = read_table(folder / DOCUMENTS_NAME, DOCUMENTS_SCHEMA).drop(["split"]).to_pylist()
    return [Document(**row) for row in rows]


def write_labels(folder: Path, labels: Iterable[Label]) -> None:
    """Writes labels.parquet atomically.

    Raises OSError as the operating system reports it.
    """
    rows = [asdict(label) for label in labels]
    write_table(folder / LABELS_NAME, pa.Table.from_pylist(rows, LABELS_SCHEMA))


def read_labels(folder: str | Path) -> Labels:
    """Opens a LABELS folder after checking that its files have the right form and fit together.

    Raises DataError: E-HYDRA-LABELS if a file is missing, damaged, or of another rubric, those of
    `load_rubric` and `os_errors`.
    """
    folder = Path(folder)
    if not (folder / LABELS_NAME).is_file():
        raise _problem(folder, f"has no {LABELS_NAME}")
    rubric = load_rubric(folder / RUBRIC_NAME)
    labels = Labels(
        path=folder,
        rubric=rubric,
        documents=read_table(folder / DOCUMENTS_NAME, DOCUMENTS_SCHEMA),
        labels=read_table(folder / LABELS_NAME, LABELS_SCHEMA),
        sample=read_json(folder / SAMPLE_NAME),
        summary=read_json(folder / SUMMARY_NAME),
    )
    _check(labels)
    return labels


def _check(labels: Labels) -> None:
    hashes = set(labels.labels["rubric_hash"].unique().to_pylist())
    if hashes - {labels.rubric.hash}:
        raise _problem(labels.path, f"holds labels by another rubric than its {RUBRIC_NAME}")
    unknown = set(labels.labels["document_id"].to_pylist()) - set(
        labels.documents["id"].to_pylist()
    )
    if unknown:
        raise _problem(labels.path, f"holds {len(unknown)} labels of documents that it lacks")
    for row in labels.labels.select(["document_id", "status", "scores"]).to_pylist():
        scores = row["scores"]
        good = scores is not None and len(scores) == len(labels.rubric.dimensions)
        good = good and all(0 <= score <= MAX_SCORE for score in scores)
        if row["status"] not in STATUSES or (row["status"] == SCORED) != (scores is not None):
            raise _problem(labels.path, f"has a label of status {row['status']} that is not so")
        if scores is not None and not good:
            raise _problem(labels.path, f"has scores {scores} for {row['document_id']}")


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a Parquet file so that readers see the old one or the new one.

    Raises OSError as the operating system reports it.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    pq.write_table(table, temporary, compression="zstd")
    sync_path(temporary)
    temporary.replace(path)
    sync_path(path.parent)


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Returns a Parquet file that has exactly the columns of `schema`.

    Raises DataError: E-HYDRA-LABELS if it does not or is damaged, those of `os_errors`.
    """
    with os_errors("read", path):
        try:
            table = pq.read_table(path)
        except pa.ArrowException as error:
            raise _problem(path, f"cannot be read: {error}") from None
    if not table.schema.equals(schema):
        raise _problem(path, f"has not the columns {', '.join(schema.names)} of this version")
    return table


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object of this version.

    Raises DataError: E-HYDRA-LABELS if the file is none, those of `os_errors`.
    """
    with os_errors("read", path):
        data = path.read_bytes()
    try:
        content = orjson.loads(data)
        version = content["schema_version"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise _problem(path, "cannot be understood") from None
    if version != SCHEMA_VERSION:
        raise _problem(path, f"has version {version}; this program reads {SCHEMA_VERSION}")
    return dict(content)


def _problem(where: Path, what: str) -> DataError:
    return DataError(
        "E-HYDRA-LABELS", f"{where} {what}", "run `nmoe-data hydra label` to its end again"
    )
