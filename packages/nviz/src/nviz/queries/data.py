"""What a data set holds: shares of its sources, lengths of its documents, one document.

Everything comes from the shards' indices, a row a document. Of a large data set every k-th row is
looked at and counts k times, so shares stay right and the time bounded. Letters: D documents looked
at, B bins of length.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nviz.errors import VizError
from nviz.store.decoding import Decoder
from nviz.store.manifests import Dataset, Shard, Source, map_index, map_tokens

MOST_ROWS = 4_000_000
MOST_GROUPS = 11
MOST_TOKENS = 8192
MOST_IDS = 256


@dataclass(frozen=True, slots=True)
class Share:
    """A group of sources: its documents and tokens in this data set, and bytes of its files."""

    group: str
    files: int
    documents: int
    tokens: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Shares of the sources, largest first; documents by length: `count_B` between `edge_B1`.

    `stride` says that every stride-th document was looked at; `problems` are shards left out.
    """

    shares: list[Share]
    edge_B1: NDArray[np.float64]
    count_B: NDArray[np.int64]
    median_tokens: float | None
    longest_tokens: int | None
    stride: int
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Document:
    """A document's text and where it came from; `tokens` is its whole length without the end, and
    `ids` and `text` are of the first `MOST_TOKENS` at most."""

    number: int
    text: str
    ids: list[int]
    tokens: int
    shard: str
    start: int
    source: str
    offset: int
    id: int


def group_names(sources: Sequence[Source]) -> list[str]:
    """The group of each source: its root where there are several, without the folder that holds
    them all, else the first part of its name."""
    if len({source.root for source in sources}) > 1:
        return _below_common([source.root for source in sources])
    return [source.name.split("/")[0] or "?" for source in sources]


def _below_common(roots: Sequence[str]) -> list[str]:
    try:
        common = os.path.commonpath(roots)
    # Relative and absolute ones together.
    except ValueError:
        return list(roots)
    return [os.path.relpath(root, common) if common else root for root in roots]


def statistics(dataset: Dataset, most_rows: int = MOST_ROWS) -> Statistics:
    """Shares and lengths over all shards that can be read."""
    total = sum(shard.documents for shard in dataset.shards)
    stride = max(1, -(-total // most_rows))
    lengths, sources, problems = [], [], []
    for shard in dataset.shards:
        try:
            index = map_index(dataset, shard)[::stride]
        except ValueError as error:
            problems.append(str(error))
            continue
        lengths.append(np.asarray(index["length"], dtype=np.int64))
        sources.append(np.asarray(index["source"], dtype=np.int64))
    length_D = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
    source_D = np.concatenate(sources) if sources else np.zeros(0, dtype=np.int64)
    edge_B1, count_B = _histogram(length_D, stride)
    return Statistics(
        shares=_shares(dataset.sources, source_D, length_D, stride),
        edge_B1=edge_B1,
        count_B=count_B,
        median_tokens=float(np.median(length_D)) if len(length_D) else None,
        longest_tokens=int(length_D.max()) if len(length_D) else None,
        stride=stride,
        problems=problems,
    )


def _histogram(
    length_D: NDArray[np.int64], stride: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Documents by length in bins that grow by a constant factor, four to a doubling at most."""
    if not len(length_D):
        return np.ones(1), np.zeros(0, dtype=np.int64)
    low, high = max(1, int(length_D.min())), int(length_D.max()) + 1
    bins = int(np.clip(np.ceil(4 * np.log2(high / low)), 1, 40))
    edges = np.unique(np.round(np.geomspace(low, high, bins + 1)))
    if len(edges) < 2:
        edges = np.array([float(low), float(low + 1)])
    counts, _ = np.histogram(length_D, edges)
    return edges, counts.astype(np.int64) * stride


def _shares(
    sources: Sequence[Source],
    source_D: NDArray[np.int64],
    length_D: NDArray[np.int64],
    stride: int,
) -> list[Share]:
    """The groups by tokens; what lies beyond the first `MOST_GROUPS` is one more group."""
    known = source_D < len(sources)
    documents = np.bincount(source_D[known], minlength=len(sources)) * stride
    tokens = np.bincount(source_D[known], length_D[known], minlength=len(sources)) * stride
    members: dict[str, list[int]] = defaultdict(list)
    for at, group in enumerate(group_names(sources)):
        members[group].append(at)
    found = [
        Share(
            group,
            len(places),
            int(documents[places].sum()),
            int(tokens[places].sum()),
            sum(sources[at].bytes or 0 for at in places),
        )
        for group, places in members.items()
    ]
    if not known.all():
        odd = ~known
        lost = int(odd.sum()) * stride
        found.append(Share("unknown", 0, lost, int(length_D[odd].sum()) * stride, None))
    found.sort(key=lambda share: (-share.tokens, share.group))
    return [*found[:MOST_GROUPS], *_others(found[MOST_GROUPS:])]


def _others(rest: list[Share]) -> list[Share]:
    if not rest:
        return []
    return [
        Share(
            f"{len(rest)} others",
            sum(share.files for share in rest),
            sum(share.documents for share in rest),
            sum(share.tokens for share in rest),
            sum(share.bytes or 0 for share in rest),
        )
    ]


def find_document(dataset: Dataset, number: int, decode: Decoder) -> Document:
    """Document `number` of a data set, counted from 0 over its shards.

    Raises VizError: `E-DOCUMENT-NUMBER` if there is no such document, `E-SHARD` if its shard is
    not what the manifest says.
    """
    left = number
    for shard in dataset.shards if number >= 0 else ():
        if left < shard.documents:
            return _document(dataset, shard, number, left, decode)
        left -= shard.documents
    raise VizError(
        "E-DOCUMENT-NUMBER",
        f"{dataset.key} has {dataset.documents} documents, not a number {number}",
        "count from 0",
    )


def _document(dataset: Dataset, shard: Shard, number: int, place: int, decode: Decoder) -> Document:
    try:
        index, tokens = map_index(dataset, shard), map_tokens(dataset, shard)
        if place >= len(index):
            raise ValueError(f"the index of {shard.name} has {len(index)} documents")
        row = index[place]
        start, length = int(row["start"]), int(row["length"])
        if length < 1 or start + length > len(tokens):
            raise ValueError(f"the index of {shard.name} points out of it")
    except ValueError as error:
        raise VizError("E-SHARD", str(error), "check it with nmoe-data verify") from error
    # The last token ends the document.
    ids = tokens[start : start + min(length - 1, MOST_TOKENS)].tolist()
    return Document(
        number=number,
        text=decode(ids),
        ids=ids[:MOST_IDS],
        tokens=length - 1,
        shard=shard.name,
        start=start,
        source=_source(dataset, int(row["source"])),
        offset=int(row["offset"]),
        id=int(row["id"]),
    )


def _source(dataset: Dataset, at: int) -> str:
    if at >= len(dataset.sources):
        return f"source {at}, which the manifest does not name"
    source = dataset.sources[at]
    return f"{source.root}/{source.name}" if source.root else source.name
