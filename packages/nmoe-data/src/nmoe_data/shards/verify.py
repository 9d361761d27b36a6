"""Everything that can be checked about a dataset folder without its sources."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmoe_data.errors import DataError
from nmoe_data.files import os_errors, sha256_file
from nmoe_data.shards.layout import (
    INDEX_DTYPE,
    Manifest,
    ShardInfo,
    index_name,
    map_shard,
    read_manifest,
    token_dtype,
)


def find_problems(folder: Path) -> list[str]:
    """Returns every fault of a dataset folder as a line that names the file; none if it is whole.

    Checks hashes, dtypes, counts, the range of ids, that index rows tile the tokens, that each
    document ends with the end-of-document token and holds no other, and that sources exist.

    Raises DataError: those of `read_manifest`, if there is no readable manifest.
    """
    manifest = read_manifest(folder)
    problems = list(_total_problems(folder, manifest))
    for shard in manifest.shards:
        try:
            problems += _shard_problems(folder, manifest, shard)
        except DataError as error:
            problems.append(str(error))
    return problems


def changed_files(folder: Path, shard: ShardInfo) -> Iterator[Path]:
    """Yields those files of a shard, tokens and index, whose SHA-256 is not the recorded one.

    Raises DataError: those of `os_errors` if one cannot be read.
    """
    recorded = {shard.name: shard.sha256, index_name(shard.name): shard.index_sha256}
    for name, expected in recorded.items():
        path = folder / name
        with os_errors("read", path):
            changed = path.is_file() and sha256_file(path) != expected
        if changed:
            yield path


def _total_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    tokens = sum(shard.tokens for shard in manifest.shards)
    documents = sum(shard.documents for shard in manifest.shards)
    if (tokens, documents) != (manifest.tokens, manifest.documents):
        yield (
            f"E-MANIFEST-COUNTS: {folder} says {manifest.tokens} tokens and {manifest.documents} "
            f"documents, its shards add up to {tokens} and {documents}"
        )


def _shard_problems(folder: Path, manifest: Manifest, shard: ShardInfo) -> Iterator[str]:
    for path in changed_files(folder, shard):
        yield f"E-SHARD-CHECKSUM: {path} is not what was written; prepare it again"
    tokens_path, index_path = folder / shard.name, folder / index_name(shard.name)
    vocab_size = manifest.tokenizer["vocab_size"]
    tokens = map_shard(tokens_path, token_dtype(vocab_size), shard.tokens)
    index = map_shard(index_path, INDEX_DTYPE, shard.documents)
    lowest, highest = int(tokens.min()), int(tokens.max())
    if highest >= vocab_size:
        yield f"E-SHARD-RANGE: {tokens_path} holds id {highest}, the vocabulary has {vocab_size}"
    if (lowest, highest) != (shard.min_id, shard.max_id):
        yield f"E-SHARD-RANGE: {tokens_path} holds ids {lowest}..{highest}, not as recorded"
    fault = _index_fault(tokens, index, manifest)
    if fault:
        yield f"E-SHARD-INDEX: {index_path} {fault}"


def _index_fault(
    tokens: npt.NDArray[Any], index: npt.NDArray[Any], manifest: Manifest
) -> str | None:
    ends = index["start"] + index["length"]
    starts = np.concatenate([[0], ends[:-1]]).astype(np.uint64)
    if not np.array_equal(index["start"], starts) or int(ends[-1]) != len(tokens):
        return "does not tile its shard"
    end_places = np.flatnonzero(tokens == manifest.tokenizer["end_of_document_id"])
    if not np.array_equal(end_places, ends.astype(np.int64) - 1):
        return "does not agree with the end-of-document tokens"
    if int(index["source"].max()) >= len(manifest.sources):
        return "names a source that the manifest does not have"
    return None
