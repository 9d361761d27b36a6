"""Writes shards so that a kill at any instant loses only what came after the last checkpoint.

The open shard grows under `.partial` names: a `.npy` header of fixed size, then rows. A checkpoint
makes the rows durable and returns their number; a resumed writer cuts the files back to that
number and goes on, so the finished bytes do not depend on where the run was stopped. Sealing
patches the header, syncs, and renames. A shard is sealed before a document that would overfill it;
a document longer than a shard gets a shard of its own.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nmoe_data.errors import DataError
from nmoe_data.files import sha256_file, sync_path, write_all
from nmoe_data.shards.layout import (
    INDEX_DTYPE,
    ShardInfo,
    index_name,
    map_shard,
    npy_header,
    shard_name,
    token_dtype,
)

PARTIAL_SUFFIX = ".partial"
FLUSH_TOKENS = 1 << 19


@dataclass(slots=True)
class WriterState:
    """How far a writer is on disk: the sealed shards, and the rows of the open one."""

    shards: list[ShardInfo] = field(default_factory=list)
    open_tokens: int = 0
    open_documents: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary for state.json."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> "WriterState":
        """Reads what `to_json` wrote."""
        shards = [ShardInfo(**shard) for shard in content["shards"]]
        return WriterState(shards, content["open_tokens"], content["open_documents"])


class _GrowingArray:
    """A one-dimensional `.npy` that grows under a temporary name until it is sealed."""

    def __init__(self, path: Path, dtype: np.dtype[Any], rows: int) -> None:
        self._final = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._dtype = dtype
        self.rows = rows
        self._file = self._open()

    def _open(self) -> BinaryIO:
        if self._final.exists():
            # The kill came after the rename and before the checkpoint that would have recorded it.
            self._final.replace(self._partial)
        self._partial.touch()
        file = self._partial.open("r+b", buffering=0)
        self._write_header(file)
        end = file.tell() + self.rows * self._dtype.itemsize
        if self._partial.stat().st_size < end:
            file.close()
            raise DataError(
                "E-RESUME-STATE",
                f"{self._partial} is shorter than state.json says",
                "remove the output folder and start again",
            )
        file.truncate(end)
        file.seek(end)
        return file

    def _write_header(self, file: BinaryIO) -> None:
        file.seek(0)
        write_all(file, npy_header(self._dtype, self.rows))

    def append(self, rows: npt.NDArray[Any]) -> None:
        write_all(self._file, rows.tobytes())
        self.rows += len(rows)

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def seal(self) -> None:
        self._write_header(self._file)
        self.sync()
        self._file.close()
        self._partial.replace(self._final)

    def close(self) -> None:
        self._file.close()


class ShardWriter:
    """Appends documents to the shards of one dataset folder.

    folder: where the shards go; made if missing. vocab_size: ids must be below it.
    end_of_document_id: appended to every document. shard_tokens: most tokens in a shard, unless one
    document alone has more. state: where an earlier writer was at its last checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        end_of_document_id: int,
        shard_tokens: int,
        state: WriterState | None = None,
    ) -> None:
        state = state or WriterState()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.shards = list(state.shards)
        self._vocab_size = vocab_size
        self._end = end_of_document_id
        self._shard_tokens = shard_tokens
        self._dtype = token_dtype(vocab_size)
        self._files: tuple[_GrowingArray, _GrowingArray] | None = None
        self._pending: list[npt.NDArray[Any]] = []
        self._pending_rows: list[tuple[int, int, int, int, int]] = []
        self._open_tokens = state.open_tokens
        self._open_documents = state.open_documents
        self._remove_unrecorded_files()

    @property
    def tokens(self) -> int:
        """Tokens appended so far, end-of-document tokens included."""
        return sum(shard.tokens for shard in self.shards) + self._open_tokens

    @property
    def documents(self) -> int:
        """Documents appended so far."""
        return sum(shard.documents for shard in self.shards) + self._open_documents

    def append(self, ids: list[int], *, source: int, offset: int, document_id: int) -> None:
        """Adds one document and its end-of-document token.

        Raises DataError: E-TOKEN-RANGE if an id is outside the vocabulary; OSError if the disk
        refuses, and the last checkpoint stays good.
        """
        tokens = self._narrow(ids)
        if self._open_tokens and self._open_tokens + len(tokens) > self._shard_tokens:
            self._seal()
        self._pending.append(tokens)
        self._pending_rows.append((self._open_tokens, len(tokens), source, offset, document_id))
        self._open_tokens += len(tokens)
        self._open_documents += 1
        if self._open_tokens - self._written_tokens() >= FLUSH_TOKENS:
            self._flush()

    def checkpoint(self) -> WriterState:
        """Makes everything appended so far durable and returns what `state` resumes from."""
        self._flush()
        for file in self._files or ():
            file.sync()
        sync_path(self.folder)
        return WriterState(list(self.shards), self._open_tokens, self._open_documents)

    def finish(self) -> list[ShardInfo]:
        """Seals the open shard and returns all shards."""
        if self._open_tokens:
            self._seal()
        return list(self.shards)

    def close(self) -> None:
        """Releases the open files without sealing; what came after the last checkpoint is lost."""
        for file in self._files or ():
            file.close()
        self._files = None

    def _narrow(self, ids: list[int]) -> npt.NDArray[Any]:
        wide = np.asarray([*ids, self._end], dtype=np.int64)
        if wide.min() < 0 or wide.max() >= self._vocab_size:
            raise DataError(
                "E-TOKEN-RANGE",
                f"the tokenizer gave ids {wide.min()}..{wide.max()} for a vocabulary of "
                f"{self._vocab_size}",
                "use a tokenizer whose file and vocabulary size agree",
            )
        return wide.astype(self._dtype)

    def _paths(self) -> tuple[Path, Path]:
        name = shard_name(len(self.shards))
        return self.folder / name, self.folder / index_name(name)

    def _open_files(self) -> tuple[_GrowingArray, _GrowingArray]:
        if self._files is None:
            tokens, index = self._paths()
            token_rows = self._open_tokens - sum(map(len, self._pending))
            index_rows = self._open_documents - len(self._pending_rows)
            self._files = (
                _GrowingArray(tokens, self._dtype, token_rows),
                _GrowingArray(index, INDEX_DTYPE, index_rows),
            )
        return self._files

    def _written_tokens(self) -> int:
        return self._files[0].rows if self._files else 0

    def _flush(self) -> None:
        if not self._pending:
            return
        tokens, index = self._open_files()
        tokens.append(np.concatenate(self._pending))
        index.append(np.array(self._pending_rows, dtype=INDEX_DTYPE))
        self._pending.clear()
        self._pending_rows.clear()

    def _seal(self) -> None:
        self._flush()
        for file in self._open_files():
            file.seal()
        sync_path(self.folder)
        self.shards.append(self._describe(*self._paths()))
        self._files = None
        self._open_tokens = self._open_documents = 0

    def _describe(self, tokens_path: Path, index_path: Path) -> ShardInfo:
        tokens = map_shard(tokens_path, self._dtype, self._open_tokens)
        return ShardInfo(
            name=tokens_path.name,
            tokens=self._open_tokens,
            documents=self._open_documents,
            sha256=sha256_file(tokens_path),
            index_sha256=sha256_file(index_path),
            min_id=int(tokens.min()),
            max_id=int(tokens.max()),
        )

    def _remove_unrecorded_files(self) -> None:
        recorded = {shard.name for shard in self.shards}
        if self._open_tokens:
            recorded.add(shard_name(len(self.shards)))
        kept = recorded | {index_name(name) for name in recorded}
        for path in self.folder.glob("shard-*.npy*"):
            if path.name.removesuffix(PARTIAL_SUFFIX) not in kept:
                path.unlink()
