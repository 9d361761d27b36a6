"""Batches of token windows as a function of (seed, step) alone: no cursor, nothing to save.

All shards in order are one stream of N tokens. Window w holds tokens w*S .. w*S + S (S = seq_len),
so inputs and next-token targets come from one window and neighbours share one token; the last
short window is dropped. Sample i = step * batch_size + row reads window P_e(i mod W) of epoch
e = i // W, where P_e is a keyed permutation of the W windows: a eight-round Feistel network over
the smallest even number of bits that holds W, walked until it lands inside (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). It needs no memory, and any rank of any layout
computes its rows directly.
"""

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmoe_data.errors import DataError
from nmoe_data.shards import Manifest, changed_files, map_dataset, read_manifest

# Fewer leave small domains visibly uneven: the halves have only a few bits.
ROUNDS = 8
CHUNK_TOKENS = 1 << 20
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of S+1 tokens.

    tokens: int64 [B, S+1]. documents: int32 [B, S+1]; 0 at the start of each row, one more at each
    document start.
    """

    tokens: Int64Array
    documents: npt.NDArray[np.int32]


class TokenDataset:
    """The shards of one dataset folder as one stream of tokens, memory-mapped.

    path: the folder. manifest: what its manifest.json says. tokens: length of the stream,
    end-of-document tokens included. documents: documents in the stream. vocab_size: every id is
    below it. end_of_document_id: the last token of every document. shards: the tokens of each
    shard, as stored.

    Raises DataError: those of `map_dataset`, for a file that is missing or of the wrong size.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.tokens = sum(shard.tokens for shard in manifest.shards)
        self.documents = sum(shard.documents for shard in manifest.shards)
        self.vocab_size: int = manifest.tokenizer["vocab_size"]
        self.end_of_document_id: int = manifest.tokenizer["end_of_document_id"]
        self.shards: list[npt.NDArray[Any]] = [tokens for tokens, _ in map_dataset(path, manifest)]
        self._starts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)])
        self._first = 0

    def part(self, start: int, stop: int) -> "TokenDataset":
        """Returns tokens start .. stop of this stream as a stream of their own, on the same files.

        It may start and end inside a document; `documents` counts those that end in it.

        Raises DataError: E-ARGUMENT if the stream does not have these tokens.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise DataError(
                "E-ARGUMENT",
                f"tokens {start} to {stop} of {self.tokens}",
                "ask for a range inside the stream",
            )
        part = copy.copy(self)
        part._first, part.tokens = self._first + start, stop - start
        ends = (chunk == self.end_of_document_id for chunk in part.chunks())
        part.documents = sum(int(at_end.sum()) for at_end in ends)
        return part

    def chunks(self) -> Iterator[Int64Array]:
        """Yields the whole stream in pieces of up to a million tokens, in order."""
        for start in range(0, self.tokens, CHUNK_TOKENS):
            yield self.read(start, min(CHUNK_TOKENS, self.tokens - start))

    def read(self, start: int, count: int, out: Int64Array | None = None) -> Int64Array:
        """Returns `count` tokens (int64) of the stream from `start` on, across shards.

        Raises DataError: E-SHARD-RANGE if an id is not in the vocabulary, naming the shard.
        """
        result = np.empty(count, np.int64) if out is None else out
        start += self._first
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < count:
            offset = start + filled - int(self._starts[number])
            part = self.shards[number][offset : offset + count - filled]
            if part.size and int(part.max()) >= self.vocab_size:
                raise self._range_error(number)
            result[filled : filled + len(part)] = part
            filled += len(part)
            number += 1
        return result

    def _range_error(self, number: int) -> DataError:
        return DataError(
            "E-SHARD-RANGE",
            f"{self.path / self.manifest.shards[number].name} holds ids outside the vocabulary of "
            f"{self.vocab_size}",
            "it is damaged; run `nmoe-data verify` and prepare it again",
        )


def open_dataset(path: str | Path, verify: bool = False) -> TokenDataset:
    """Opens a folder that `nmoe-data prep` finished, after checking manifest, dtypes and sizes.

    path: the folder with manifest.json (OUT/train, OUT/held-out). The shards and their indexes are
    checked. verify: also check the SHA-256 of all of them, which reads them whole.
    Raises DataError: E-DATASET-MISSING, E-MANIFEST-INVALID, E-SCHEMA-VERSION, E-SHARD-MISSING,
    E-SHARD-LAYOUT, E-SHARD-RANGE or E-SHARD-CHECKSUM, naming the file; those of `os_errors` if one
    cannot be read.
    """
    path = Path(path)
    manifest = read_manifest(path)
    dataset = TokenDataset(path, manifest)
    for number, shard in enumerate(manifest.shards):
        if shard.max_id >= dataset.vocab_size:
            raise dataset._range_error(number)
        for changed in changed_files(path, shard) if verify else ():
            raise DataError(
                "E-SHARD-CHECKSUM",
                f"{changed} is not what was written",
                "it is damaged; prepare it again",
            )
    return dataset


def permute(indices: UInt64Array, size: int, seed: int, epoch: int) -> UInt64Array:
    """Maps indices in [0, size) to [0, size) by the bijection keyed by (seed, epoch).

    indices: uint64, any shape; the result is uint64 of the same shape. size: at least 1, at most
    2**62.
    """
    half_bits = max(1, (int(size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    result = _feistel(indices.astype(np.uint64), half_bits, keys)
    # Cycle walking: the network covers less than 4 * size values, so few rounds are left outside.
    outside = result >= size
    while outside.any():
        result[outside] = _feistel(result[outside], half_bits, keys)
        outside = result >= size
    return result


def _round_keys(seed: int, epoch: int) -> UInt64Array:
    message = f"nmoe-data window order: seed {seed}, epoch {epoch}".encode()
    digest = hashlib.blake2b(message, digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: UInt64Array, half_bits: int, keys: UInt64Array) -> UInt64Array:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: UInt64Array) -> UInt64Array:
    """Scrambles 64-bit words (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * MIX_1
    values = (values ^ (values >> np.uint64(27))) * MIX_2
    return values ^ (values >> np.uint64(31))


class Loader:
    """Shuffled batches of a dataset; the same (seed, step) gives the same batch on any layout.

    dataset: what to read. seq_len: S; rows have S+1 tokens. seed: chooses the order. windows: rows
    in one epoch.
    Raises DataError: E-ARGUMENT if seq_len is below 1, E-DATA-TOO-SMALL if the dataset does not
    fill one window.
    """

    def __init__(self, dataset: TokenDataset, *, seq_len: int, seed: int) -> None:
        if seq_len < 1:
            raise DataError("E-ARGUMENT", f"seq_len is {seq_len}", "give at least 1")
        if dataset.tokens < seq_len + 1:
            raise DataError(
                "E-DATA-TOO-SMALL",
                f"{dataset.path} holds {dataset.tokens} tokens, one row of seq_len {seq_len} "
                f"needs {seq_len + 1}",
                "prepare more text or lower seq_len",
            )
        self.dataset = dataset
        self.seq_len = seq_len
        self.seed = seed
        self.windows = (dataset.tokens - 1) // seq_len

    def batch(self, step: int, batch_size: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Returns rank's contiguous slice of the global batch of `step`.

        step: from 0. batch_size: rows of the global batch, B_global; the result has
        B_global / ranks.
        Raises DataError: E-BATCH-RANKS if the rows cannot be shared equally, E-ARGUMENT if there
        is no such rank or step.
        """
        if batch_size < 1 or batch_size % ranks:
            raise DataError(
                "E-BATCH-RANKS",
                f"a batch of {batch_size} rows cannot be shared by {ranks} ranks",
                "make the batch size a multiple of the data-parallel size",
            )
        if not 0 <= rank < ranks or step < 0:
            raise DataError(
                "E-ARGUMENT",
                f"rank {rank} of {ranks}, step {step}",
                "rank counts from 0 below ranks, step from 0",
            )
        rows = batch_size // ranks
        first = step * batch_size + rank * rows
        return self._gather(self._windows_of(first, rows))

    def sequential(self, index0: int, count: int) -> Batch:
        """Returns windows index0 .. index0 + count in order, unshuffled; fewer at the end.

        Stepping index0 by `count` from 0 covers each window once.

        Raises DataError: E-ARGUMENT if index0 is not a window.
        """
        if not 0 <= index0 < self.windows or count < 1:
            raise DataError(
                "E-ARGUMENT",
                f"windows {index0} to {index0 + count} of {self.windows}",
                "ask for at least one window below the number of windows",
            )
        return self._gather(np.arange(index0, min(index0 + count, self.windows)))

    def _windows_of(self, first: int, rows: int) -> Int64Array:
        samples = np.arange(first, first + rows, dtype=np.int64)
        epochs, indices = np.divmod(samples, self.windows)
        windows = np.empty(rows, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order = permute(indices[chosen].astype(np.uint64), self.windows, self.seed, int(epoch))
            windows[chosen] = order.astype(np.int64)
        return windows

    def _gather(self, windows: Int64Array) -> Batch:
        tokens = np.empty((len(windows), self.seq_len + 1), np.int64)
        for row, window in enumerate(windows):
            self.dataset.read(int(window) * self.seq_len, self.seq_len + 1, tokens[row])
        documents = np.zeros(tokens.shape, np.int32)
        ends = tokens[:, :-1] == self.dataset.end_of_document_id
        np.cumsum(ends, axis=1, dtype=np.int32, out=documents[:, 1:])
        return Batch(tokens, documents)
