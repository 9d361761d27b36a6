"""Hashed words, word pairs and byte n-grams with surface statistics: no weights, no vocabulary.

A row has four blocks, each made from the first 65,536 characters of the document:

1. words and pairs of neighbouring words, 2**16 columns. A word is a run of ASCII letters, digits,
   `_` and non-ASCII bytes, with ASCII letters in lower case.
2. byte 3-grams of the lower-cased UTF-8, 2**13 columns.
3. the square root of the share of each lower-cased ASCII byte, times 3, 128 columns.
4. surface statistics (STATISTICS), each as (value - centre) / spread with constants fixed here; a
   spread is three times what is usual, so that they weigh about as much as a hashed block.

The value of a hashed column is log(1 + count), and each hashed block is scaled to unit length.

A word's hash is the polynomial sum of its bytes b_j as b_j * P**j mod 2**64. From prefix sums over
a whole batch it is one subtraction and one product with the inverse power per word (Karp and Rabin
1987), so that numpy does all of it without a loop over words; a multiplicative mix takes the high
bits as the column. As everything is exact integer arithmetic, the batch changes nothing.

Letters: N documents, B bytes of a batch, M words of a batch, W width.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, hstack, vstack

from nmoe_data.hydra.encoder.contract import FloatArray

MAX_CHARACTERS = 1 << 16
WORD_BITS = 16
GRAM_BITS = 13
GRAM_BYTES = 3
ASCII = 128
ASCII_WEIGHT = 3.0
BATCH_BYTES = 1 << 18
# A key, document and column, has to fit in 31 bits.
BATCH_DOCUMENTS = 1 << 14
# Up to so many cells per key a table is counted faster than keys are sorted.
DENSE_CELLS = 16
# An odd number has an inverse mod 2**64.
BASE = 0x9E3779B97F4A7C15
MIX = np.uint64(0xD6E8FEB86659FD93)
PAIR = np.uint64(0xA0761D6478BD642F)
GRAM_MIX = np.uint32(0x9E3779B1)
VERSION = 1

# name: (centre, spread), from chunks of prose and of source code.
STATISTICS = {
    "log_bytes": (7.5, 3.0),
    "bytes_per_word": (5.0, 3.0),
    "distinct_words": (0.55, 0.45),
    "words_per_line": (5.0, 6.0),
    "long_words": (0.2, 0.3),
    "digits": (0.03, 0.1),
    "capitals": (0.05, 0.15),
    "punctuation": (0.13, 0.15),
    "white_space": (0.25, 0.25),
    "non_ascii": (0.0, 0.15),
    "line_breaks": (0.03, 0.03),
    "distinct_grams": (0.3, 0.4),
}
LONG_WORD = 8
WORD_COLUMNS, GRAM_COLUMNS = 1 << WORD_BITS, 1 << GRAM_BITS
WIDTH = WORD_COLUMNS + GRAM_COLUMNS + ASCII + len(STATISTICS)

ByteArray = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.int32]

LETTERS = b"abcdefghijklmnopqrstuvwxyz"
# Classes of bytes; every byte is in one.
LETTER, DIGIT, CAPITAL, NON_ASCII, SPACE, LINE_BREAK, PUNCTUATION, CLASSES = range(8)


def _class_table() -> ByteArray:
    table = np.full(256, PUNCTUATION, np.uint8)
    table[128:] = NON_ASCII
    members = {
        LETTER: LETTERS + b"_",
        DIGIT: b"0123456789",
        CAPITAL: LETTERS.upper(),
        SPACE: b" \t\r\v\f",
        LINE_BREAK: b"\n",
    }
    for number, characters in members.items():
        table[list(characters)] = number
    return table


CLASS_OF = _class_table()
CLASS_MEMBERS = np.eye(CLASSES, dtype=np.int64)[CLASS_OF]
IS_WORD = CLASS_OF <= NON_ASCII
CAPITALS = slice(ord("A"), ord("Z") + 1)
LOWER = np.frombuffer(bytes(range(256)).lower(), np.uint8)
SEPARATOR = b"\0"


def _powers(base: int, count: int) -> UInt64Array:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


class HashedEncoder:
    """The encoder `hashed`; it is fixed, so its hash is that of its definition."""

    name = "hashed"
    width = WIDTH
    device = "cpu"
    dtype = "float32"
    hash = hashlib.sha256(
        f"nmoe-data hashed {VERSION} {MAX_CHARACTERS} {WORD_BITS} {GRAM_BITS} {GRAM_BYTES} "
        f"{ASCII} {ASCII_WEIGHT} {BASE} {MIX} {PAIR} {GRAM_MIX} {LONG_WORD} {STATISTICS}".encode()
    ).hexdigest()

    def __init__(self) -> None:
        # A document of four-byte characters may exceed a batch alone.
        longest = max(BATCH_BYTES, 4 * MAX_CHARACTERS) + 2
        self._powers = _powers(BASE, longest)
        self._inverse_powers = _powers(pow(BASE, -1, 2**64), longest)

    def encode(self, texts: Sequence[str]) -> csr_array:
        """Returns float32 CSR [N, W]; a row depends on its own text alone."""
        parts = [self._encode_batch(batch) for batch in _batches(texts)]
        if not parts:
            return csr_array((0, WIDTH), dtype=np.float32)
        return parts[0] if len(parts) == 1 else csr_array(vstack(parts, format="csr"))

    def _encode_batch(self, documents: list[bytes]) -> csr_array:
        batch = Batch(documents)
        words = self._word_hashes(batch)
        word_block, distinct_words = _block(batch.count, *_word_keys(batch, words), WORD_BITS)
        gram_block, distinct_grams = _block(batch.count, *_gram_keys(batch), GRAM_BITS)
        bytes_of = _byte_counts(batch)
        surface = _statistics(batch, bytes_of, distinct_words, distinct_grams)
        dense = csr_array(np.concatenate([_ascii_block(batch, bytes_of), surface], axis=1))
        return csr_array(hstack([word_block, gram_block, dense], format="csr"))

    def _word_hashes(self, batch: "Batch") -> UInt64Array:
        terms = batch.lower.astype(np.uint64) * self._powers[: len(batch.lower)]
        sums = np.cumsum(terms)
        # A separator stands before the first word, so starts - 1 is never negative.
        polynomials = sums[batch.word_ends - 1] - sums[batch.word_starts - 1]
        return polynomials * self._inverse_powers[batch.word_starts]


class Batch:
    """Documents one after another, a separator around each, and where their words are.

    lower: the bytes [B], ASCII letters in lower case. first, length: [N], where a document's bytes
    start and how many there are. word_starts, word_ends: [M]. word_document: [M], its number.
    """

    def __init__(self, documents: list[bytes]) -> None:
        self.count = len(documents)
        joined = SEPARATOR + SEPARATOR.join(documents) + SEPARATOR
        self.bytes = np.frombuffer(joined, np.uint8)
        self.lower = LOWER[self.bytes]
        self.length = np.array([len(document) for document in documents], np.int64)
        self.first = 1 + np.concatenate([[0], np.cumsum(self.length + 1)[:-1]])
        # The separator counts to the document after which it stands, the first one to document 0.
        per_document = self.length + 1
        per_document[0] += 1
        self.document = np.repeat(np.arange(self.count, dtype=np.int32), per_document)
        edges = np.flatnonzero(np.diff(IS_WORD[self.bytes])) + 1
        self.word_starts, self.word_ends = edges[::2], edges[1::2]
        self.word_document = self.document[self.word_starts]


def _batches(texts: Sequence[str]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        document = text[:MAX_CHARACTERS].encode(errors="replace")
        full = size + len(document) > BATCH_BYTES - len(batch)
        if batch and (full or len(batch) == BATCH_DOCUMENTS):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document)
    if batch:
        yield batch


def _word_keys(batch: Batch, words: UInt64Array) -> tuple[KeyArray, KeyArray]:
    """Returns documents and columns of all words and of all pairs inside a document."""
    documents = batch.word_document
    inside = documents[1:] == documents[:-1]
    pairs = (words[:-1] * PAIR + words[1:])[inside]
    hashes = np.concatenate([words, pairs])
    mixed = (hashes ^ (hashes >> np.uint64(32))) * MIX
    columns = (mixed >> np.uint64(64 - WORD_BITS)).astype(np.int32)
    return np.concatenate([documents, documents[1:][inside]]), columns


def _gram_keys(batch: Batch) -> tuple[KeyArray, KeyArray]:
    """Returns documents and columns of all byte 3-grams inside a document."""
    count = max(len(batch.lower) - GRAM_BYTES + 1, 0)
    shifted = (
        batch.lower[at : at + count].astype(np.uint32) << (8 * at) for at in range(GRAM_BYTES)
    )
    grams = reduce(np.bitwise_or, shifted) * GRAM_MIX
    inside = np.ones(len(batch.lower), bool)
    separators = np.append(batch.first - 1, len(batch.lower) - 1)
    for distance in range(GRAM_BYTES):
        inside[np.maximum(separators - distance, 0)] = False
    kept = inside[:count]
    columns = (grams >> np.uint32(32 - GRAM_BITS)).astype(np.int32)
    return batch.document[:count][kept], columns[kept]


def _block(
    count: int, documents: KeyArray, columns: KeyArray, bits: int
) -> tuple[csr_array, IntArray]:
    """Returns rows of unit length with log(1 + occurrences), and the occupied columns per row."""
    keys, occurrences = _count((documents << bits) | columns, count << bits)
    rows, found = keys >> bits, keys & ((1 << bits) - 1)
    values = np.log1p(occurrences)
    norms = np.sqrt(np.bincount(rows, weights=values * values, minlength=count))
    occupied = np.bincount(rows, minlength=count)
    bounds = np.concatenate([[0], np.cumsum(occupied)]).astype(np.int32)
    scaled = (values / norms[rows]).astype(np.float32)
    block = csr_array((scaled, found.astype(np.int32), bounds), shape=(count, 1 << bits))
    return block, occupied


def _count(keys: KeyArray, cells: int) -> tuple[IntArray, IntArray]:
    """Returns the distinct keys, ascending, and how often each occurs."""
    if cells <= DENSE_CELLS * len(keys):
        table = np.bincount(keys, minlength=cells)
        found = np.flatnonzero(table)
        return found, table[found]
    ordered = np.sort(keys)
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    return ordered[starts].astype(np.int64), np.diff(starts, append=len(keys))


def _byte_counts(batch: Batch) -> IntArray:
    """Returns how often each byte stands in each document, [N, 256]."""
    at = (batch.document.astype(np.int64) << 8) | batch.bytes
    counts = np.bincount(at, minlength=batch.count << 8).reshape(batch.count, 256)
    counts[:, SEPARATOR[0]] = 0
    return counts


def _ascii_block(batch: Batch, bytes_of: IntArray) -> FloatArray:
    lower = bytes_of[:, :ASCII].copy()
    lower[:, CAPITALS.start + 32 : CAPITALS.stop + 32] += lower[:, CAPITALS]
    lower[:, CAPITALS] = 0
    shares = lower / np.maximum(batch.length, 1)[:, None]
    return (ASCII_WEIGHT * np.sqrt(shares)).astype(np.float32)


def _statistics(
    batch: Batch, bytes_of: IntArray, distinct_words: IntArray, distinct_grams: IntArray
) -> FloatArray:
    """Returns float32 [N, len(STATISTICS)]."""
    classes = bytes_of @ CLASS_MEMBERS
    lengths = batch.word_ends - batch.word_starts
    words = np.bincount(batch.word_document, minlength=batch.count)
    word_bytes = np.bincount(batch.word_document, weights=lengths, minlength=batch.count)
    is_long = lengths >= LONG_WORD
    long_words = np.bincount(batch.word_document, weights=is_long, minlength=batch.count)
    size, word_count = np.maximum(batch.length, 1), np.maximum(words, 1)
    values = {
        "log_bytes": np.log1p(batch.length),
        "bytes_per_word": word_bytes / word_count,
        "distinct_words": distinct_words / np.maximum(2 * words - 1, 1),
        "words_per_line": words / (classes[:, LINE_BREAK] + 1),
        "long_words": long_words / word_count,
        "digits": classes[:, DIGIT] / size,
        "capitals": classes[:, CAPITAL] / size,
        "punctuation": classes[:, PUNCTUATION] / size,
        "white_space": (classes[:, SPACE] + classes[:, LINE_BREAK]) / size,
        "non_ascii": classes[:, NON_ASCII] / size,
        "line_breaks": classes[:, LINE_BREAK] / size,
        "distinct_grams": distinct_grams / size,
    }
    columns = [(values[name] - centre) / spread for name, (centre, spread) in STATISTICS.items()]
    return np.stack(columns, axis=1).astype(np.float32)
