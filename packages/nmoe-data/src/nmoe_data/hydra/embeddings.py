"""A cache of features on disk: shards of rows by document id, one folder per encoder and type.

FOLDER/<encoder hash>-<dtype>/part-NNNNN.npz holds the ids and the rows (dense, or the three arrays
of a CSR matrix) of up to SHARD_DOCUMENTS documents. A shard appears under its name only when it is
whole; its bytes carry checksums (zip), so a damaged one is an error and never a wrong row.

Letters: N documents, W width of the encoder.
"""

import io
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array, vstack

from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, only_writer, os_errors
from nmoe_data.hydra.encoder.contract import Encoder, FloatMatrix

SHARD_DOCUMENTS = 1024
SHARD_PATTERN = "part-*.npz"
ID_BYTES = 64

Progress = Callable[[int, int], None]


def encode_all(
    encoder: Encoder, texts: Sequence[str], progress: Progress | None = None
) -> FloatMatrix:
    """Returns the features [N, W] of `texts`, a shard's worth at a time.

    progress: called with the documents done and N; may raise to stop.
    """
    parts: list[FloatMatrix] = []
    for first in range(0, len(texts), SHARD_DOCUMENTS):
        parts.append(encoder.encode(texts[first : first + SHARD_DOCUMENTS]))
        if progress is not None:
            progress(min(first + SHARD_DOCUMENTS, len(texts)), len(texts))
    return stacked(parts) if parts else encoder.encode([])


def stacked(parts: Sequence[FloatMatrix]) -> FloatMatrix:
    """Returns matrices below one another, all dense or all sparse."""
    if isinstance(parts[0], csr_array):
        return csr_array(vstack(parts, format="csr"))
    return np.concatenate(parts)


class EmbeddingCache:
    """The rows of one encoder below `folder`; what is missing is encoded and added."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self.folder = folder / f"{encoder.hash[:32]}-{encoder.dtype}"
        self._encoder = encoder

    def features(
        self, ids: Sequence[str], texts: Sequence[str], progress: Progress | None = None
    ) -> FloatMatrix:
        """Returns the features [N, W] of documents, in their order.

        ids: SHA-256 of the texts, hex. progress: called with the documents done and N after each
        new shard; may raise to stop, and what is done stays.
        Raises DataError: E-HYDRA-EMBEDDINGS if a shard is damaged, E-OUT-BUSY if another process
        is writing, those of `os_errors`.
        """
        with os_errors("write the embeddings in", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with only_writer(self.folder):
                self._add_missing(dict(zip(ids, texts, strict=True)), progress)
                return self._read(ids)

    def _add_missing(self, texts: dict[str, str], progress: Progress | None) -> None:
        known = {id for path in self._shards() for id in self._ids(path)}
        missing = [id for id in texts if id not in known]
        number = max((int(path.stem.removeprefix("part-")) for path in self._shards()), default=-1)
        for first in range(0, len(missing), SHARD_DOCUMENTS):
            chosen = missing[first : first + SHARD_DOCUMENTS]
            rows = self._encoder.encode([texts[id] for id in chosen])
            number += 1
            atomic_write(self.folder / f"part-{number:05d}.npz", _packed(chosen, rows))
            if progress is not None:
                progress(len(texts) - len(missing) + first + len(chosen), len(texts))

    def _read(self, ids: Sequence[str]) -> FloatMatrix:
        place = {id: at for at, id in enumerate(dict.fromkeys(ids))}
        parts: list[FloatMatrix] = []
        order: list[int] = []
        for path in self._shards():
            found = [(row, place[id]) for row, id in enumerate(self._ids(path)) if id in place]
            if found:
                rows, places = zip(*found, strict=True)
                parts.append(self._load(path, _unpacked)[list(rows)])
                order += places
        if not parts:
            return self._encoder.encode([])
        at = np.empty(len(order), np.int64)
        at[order] = np.arange(len(order))
        return stacked(parts)[at[[place[id] for id in ids]]]

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob(SHARD_PATTERN))

    def _ids(self, path: Path) -> list[str]:
        return self._load(path, lambda shard: [id.decode() for id in shard["ids"].tolist()])

    def _load(self, path: Path, read: Callable[[Any], Any]) -> Any:
        try:
            with np.load(path, allow_pickle=False) as shard:
                return read(shard)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                "E-HYDRA-EMBEDDINGS", f"{path} is damaged ({error})", "delete it and run again"
            ) from error


def _packed(ids: Sequence[str], rows: FloatMatrix) -> bytes:
    arrays: dict[str, Any] = {"ids": np.array([id.encode() for id in ids], f"S{ID_BYTES}")}
    if isinstance(rows, csr_array):
        arrays |= {"data": rows.data, "indices": rows.indices, "indptr": rows.indptr}
        arrays["shape"] = np.array(rows.shape)
    else:
        arrays["rows"] = rows
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _unpacked(shard: Any) -> FloatMatrix:
    if "rows" in shard:
        return shard["rows"]
    parts = (shard["data"], shard["indices"], shard["indptr"])
    return csr_array(parts, shape=tuple(shard["shape"]))
