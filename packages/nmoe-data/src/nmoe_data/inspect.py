"""From a document's number back to its text and to the record it came from."""

from dataclasses import dataclass
from pathlib import Path

from nmoe_data.errors import DataError
from nmoe_data.shards import INDEX_DTYPE, Manifest, map_shard, read_manifest, token_dtype
from nmoe_data.shards.layout import index_name
from nmoe_data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """A document's text and origin; tokens `start` to `end` (excluded) of `shard`."""

    text: str
    shard: str
    start: int
    end: int
    source: str
    offset: int
    id: int


def find_document(folder: Path, number: int) -> FoundDocument:
    """Returns document `number` of a dataset folder, decoded with the tokenizer beside it.

    Raises DataError: E-DOCUMENT-NUMBER if there is no such document, E-TOKENIZER-MISSING or
    E-TOKENIZER-DRIFT if the tokenizer beside it is not the one that made it, those of
    `load_tokenizer`, `read_manifest` and `map_shard` for a bad dataset.
    """
    manifest = read_manifest(folder)
    tokenizer = _tokenizer_of(folder, manifest)
    left = number
    for shard in manifest.shards if number >= 0 else []:
        if left >= shard.documents:
            left -= shard.documents
            continue
        index = map_shard(folder / index_name(shard.name), INDEX_DTYPE, shard.documents)
        tokens = map_shard(folder / shard.name, token_dtype(tokenizer.vocab_size), shard.tokens)
        row = index[left]
        start, end = int(row["start"]), int(row["start"] + row["length"])
        source = manifest.sources[int(row["source"])]
        return FoundDocument(
            text=tokenizer.decode(tokens[start : end - 1].tolist()),
            shard=shard.name,
            start=start,
            end=end,
            source=f"{source['root']}/{source['name']}",
            offset=int(row["offset"]),
            id=int(row["id"]),
        )
    raise DataError(
        "E-DOCUMENT-NUMBER",
        f"{folder} has {manifest.documents} documents, not a number {number}",
        "count from 0",
    )


def _tokenizer_of(folder: Path, manifest: Manifest) -> Tokenizer:
    path = folder.resolve().parent / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    if tokenizer.hash != manifest.tokenizer["hash"]:
        raise DataError(
            "E-TOKENIZER-DRIFT",
            f"{path} is not the tokenizer that made {folder}",
            "put the tokenizer.json back that prep wrote",
        )
    return tokenizer
