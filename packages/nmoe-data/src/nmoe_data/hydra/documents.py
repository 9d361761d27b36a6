"""Documents to grade: their identity, their side of the split, their stratum, a sample of them.

A stratum is a domain (the source as it was named) and a range of lengths. The sample is drawn in
one pass: each document has a key, a hash of (seed, id), and the N smallest keys of all are a
simple random sample, proportional to the strata on average. So that no stratum is missing, each of
the S strata first gets its own N/(4S) smallest keys. Within a stratum a sample is always its
smallest keys, so what was seen over what was sampled is the weight of its documents; and nothing
depends on the order in which documents come. Memory: 1.25 N documents at most.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from nmoe_data.errors import DataError
from nmoe_data.sources import (
    Rejection,
    Source,
    SourceFile,
    list_files,
    listing_hash,
    source_list,
)
from nmoe_data.sources import read_documents as read_records

SPLITS = ("train", "validation", "test")
SPLIT_ENDS = (0.70, 0.85, 1.0)
# Characters; a bucket goes up to below the next.
LENGTH_BUCKETS = (0, 512, 2048, 8192, 32768)
FLOOR_SHARE = 4


@dataclass(frozen=True, slots=True)
class Document:
    """A text to grade.

    id: SHA-256 of its text, hex. source: root and name of its file. offset: where its record
    starts in it (bytes after decompression, or a row number). stratum: domain and length.
    """

    id: str
    text: str
    source: str
    offset: int
    stratum: str


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """How far the reading is, in bytes of the files on disk."""

    bytes_done: int
    bytes_total: int
    documents: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampled documents, and what they stand for.

    documents: in random order, so that any first part is a sample too. seen: documents by stratum.
    rejected: records that are no documents, by reason. sources: as typed. listing: hash of names
    and sizes of the files.
    """

    documents: list[Document]
    seen: dict[str, int]
    rejected: dict[str, int]
    sources: list[str]
    listing: str

    @property
    def sampled(self) -> dict[str, int]:
        """Sampled documents by stratum."""
        return dict(Counter(document.stratum for document in self.documents))


def document_id(text: str) -> str:
    """Returns the SHA-256 of the text in UTF-8 as hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(id: str) -> str:
    """Returns the side of a document: train (70 %), validation (15 %) or test (15 %), by its id."""
    digest = hashlib.blake2b(id.encode(), digest_size=8, person=b"hydra split").digest()
    share = int.from_bytes(digest, "little") / 2**64
    return next(name for name, end in zip(SPLITS, SPLIT_ENDS, strict=True) if share < end)


def domains_of(sources: Sequence[str]) -> dict[str, str]:
    """Returns the domain of each source as typed: its last name, or all of it where two share one.

    A compressed or plain file loses its extensions: `web.jsonl.zst` is the domain `web`.
    """
    short = {source: Path(source).name.split(".")[0] or source for source in sources}
    shared = Counter(short.values())
    return {source: name if shared[name] == 1 else source for source, name in short.items()}


def stratum_of(domain: str, text: str) -> str:
    """Returns domain and range of characters, as in `web/512-2047`."""
    length = len(text)
    at = sum(length >= start for start in LENGTH_BUCKETS) - 1
    start, end = LENGTH_BUCKETS[at], LENGTH_BUCKETS[at + 1 : at + 2]
    return f"{domain}/{start}-{end[0] - 1}" if end else f"{domain}/{start}-"


def domain_of(stratum: str) -> str:
    """Returns the domain in a stratum."""
    return stratum.rpartition("/")[0]


def read_documents(
    source: Source,
    text_field: str = "text",
    exclude: Sequence[Path] = (),
    rejected: Counter[str] | None = None,
) -> Iterator[Document]:
    """Yields the documents of the sources, in the order in which they are read.

    text_field: the field of JSON records, or the column of Parquet files. exclude: folders that are
    left out. rejected: counts the records that are no documents, by reason.

    Raises DataError: those of `list_files`.
    """
    files = list_files(source, exclude)
    for document, _, _ in _read(files, text_field, Counter() if rejected is None else rejected):
        yield document


def _read(
    files: list[SourceFile], text_field: str, rejected: Counter[str]
) -> Iterator[tuple[Document, int, int]]:
    """Yields each document with its file's number and the bytes of that file used so far."""
    domains = domains_of(list(dict.fromkeys(file.root for file in files)))
    for record in read_records(files, text_field=text_field):
        if isinstance(record, Rejection):
            rejected[record.reason] += 1
            continue
        file = files[record.source_index]
        document = Document(
            id=document_id(record.text),
            text=record.text,
            source=f"{file.root}/{file.name}",
            offset=record.byte_offset,
            stratum=stratum_of(domains[file.root], record.text),
        )
        yield document, record.source_index, record.consumed


def sample_documents(
    source: Source,
    size: int,
    seed: int,
    *,
    text_field: str = "text",
    exclude: Sequence[Path] = (),
    progress: Callable[[SampleProgress], None] | None = None,
) -> Sample:
    """Returns `size` documents of the sources, or all if there are fewer; equal texts count once.

    seed: chooses them. progress: called after each document.

    Raises DataError: E-ARGUMENT for a size below 1, E-NO-TEXT if there is no document at all, and
    those of `list_files`.
    """
    if size < 1:
        raise DataError("E-ARGUMENT", f"the sample size is {size}", "give at least 1")
    files = list_files(source, exclude)
    before = [0]
    for file in files:
        before.append(before[-1] + file.size)
    reservoir = Reservoir(size, seed)
    rejected: Counter[str] = Counter()
    for number, (document, at, consumed) in enumerate(_read(files, text_field, rejected), 1):
        reservoir.add(document)
        if progress is not None:
            progress(SampleProgress(before[at] + consumed, before[-1], number))
    if not reservoir.seen:
        refused = ", ".join(f"{reason} {count}" for reason, count in rejected.most_common(3))
        raise DataError(
            "E-NO-TEXT", f"no record of the sources is a document ({refused})", "check the sources"
        )
    return Sample(
        documents=reservoir.documents(),
        seen=dict(sorted(reservoir.seen.items())),
        rejected=dict(sorted(rejected.items())),
        sources=source_list(source),
        listing=listing_hash(files),
    )


@dataclass(slots=True)
class Reservoir:
    """The sample while documents come by.

    size: N. seed: chooses the keys. seen: documents by stratum, equal texts each time.
    """

    size: int
    seed: int
    seen: Counter[str] = field(default_factory=Counter)
    _all: "_Smallest" = field(init=False)
    _strata: "dict[str, _Smallest]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all = _Smallest(self.size)

    def add(self, document: Document) -> None:
        """Takes a document into account."""
        self.seen[document.stratum] += 1
        if document.stratum not in self._strata:
            self._strata[document.stratum] = _Smallest(self.size)
            floor = max(1, self.size // (FLOOR_SHARE * len(self._strata)))
            for smallest in self._strata.values():
                smallest.shrink(floor)
        key = self._key(document.id)
        self._all.add(key, document)
        self._strata[document.stratum].add(key, document)

    def documents(self) -> list[Document]:
        """Returns the sample, by key."""
        floors = (item for one in self._strata.values() for item in one.items())
        chosen = dict(sorted(floors, key=itemgetter(0))[: self.size])
        for key, document in sorted(self._all.items(), key=itemgetter(0)):
            if len(chosen) >= self.size:
                break
            chosen.setdefault(key, document)
        return [chosen[key] for key in sorted(chosen)]

    def _key(self, id: str) -> tuple[int, str]:
        message = f"{self.seed}\0{id}".encode()
        digest = hashlib.blake2b(message, digest_size=8, person=b"hydra sample").digest()
        return int.from_bytes(digest, "little"), id


class _Smallest:
    """The `size` smallest keys and their documents; of equal keys the first one stays."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._documents: dict[tuple[int, str], Document] = {}
        self._heap: list[tuple[int, str]] = []

    def add(self, key: tuple[int, str], document: Document) -> None:
        if key in self._documents:
            return
        negative = (-key[0], key[1])
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, negative)
        elif negative <= self._heap[0]:
            return
        else:
            self._drop(heapq.heapreplace(self._heap, negative))
        self._documents[key] = document

    def shrink(self, size: int) -> None:
        self._size = min(self._size, size)
        while len(self._heap) > self._size:
            self._drop(heapq.heappop(self._heap))

    def items(self) -> list[tuple[tuple[int, str], Document]]:
        return list(self._documents.items())

    def _drop(self, negative: tuple[int, str]) -> None:
        del self._documents[(-negative[0], negative[1])]
