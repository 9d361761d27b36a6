"""The token shards that a demo's runs name as their data, in nmoe-data's format.

Documents are sentences of plain words; a token is a byte, and 256 ends a document. Letters: N
tokens of a shard, D its documents.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

DOCUMENTS = {"train": 240, "held-out": 12}
SHARD_DOCUMENTS = 120
END_OF_DOCUMENT = 256
INDEX_DTYPE = np.dtype(
    [("start", "<u8"), ("length", "<u8"), ("source", "<u4"), ("offset", "<u8"), ("id", "<u8")]
)
SOURCES = ("web.jsonl", "code.jsonl", "books.jsonl")
PROSE = (
    "the router sends every token to its experts and their answers come back in order while "
    "gradients flow through gates that learn which expert knows what about language code and "
    "numbers a balanced load keeps each device busy and an idle expert is a wasted one"
)
TOKENIZER = {"type": "nmoe-bytes", "version": 1, "end_of_document_id": END_OF_DOCUMENT}


def write_dataset(folder: Path, seed: int) -> int:
    """Writes train and held-out shards with manifests and the tokenizer; returns the training
    tokens.
    """
    folder.mkdir(parents=True)
    tokenizer = json.dumps(TOKENIZER, indent=2).encode()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    drawn = np.random.default_rng([seed, 77])
    written = {
        split: _write_split(folder / split, split, documents, drawn, tokenizer)
        for split, documents in DOCUMENTS.items()
    }
    rejected = {"source": SOURCES[0], "offset": 812, "reason": "invalid-utf8"}
    (folder / "rejected.jsonl").write_text(json.dumps(rejected) + "\n")
    return written["train"]


def _document(drawn: np.random.Generator) -> str:
    words, sentences = PROSE.split(), []
    for _ in range(int(drawn.integers(3, 12))):
        picked = drawn.choice(words, size=int(drawn.integers(5, 16)))
        sentences.append(" ".join(picked).capitalize() + ".")
    return " ".join(sentences)


def _write_split(
    folder: Path, split: str, documents: int, drawn: np.random.Generator, tokenizer: bytes
) -> int:
    folder.mkdir()
    offsets = [0] * len(SOURCES)
    shards = []
    for number, first in enumerate(range(0, documents, SHARD_DOCUMENTS)):
        count = min(SHARD_DOCUMENTS, documents - first)
        texts = [_document(drawn) for _ in range(count)]
        shards.append(_write_shard(folder, number, texts, offsets, drawn))
    tokens = sum(shard["tokens"] for shard in shards)
    manifest = _manifest(split, shards, offsets, tokens, documents, tokenizer)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return tokens


def _write_shard(
    folder: Path, number: int, texts: list[str], offsets: list[int], drawn: np.random.Generator
) -> dict[str, Any]:
    """Writes one shard with its index; moves the sources' byte `offsets` on."""
    tokens_N: list[int] = []
    index_D = np.zeros(len(texts), INDEX_DTYPE)
    for row, text in enumerate(texts):
        content = text.encode()
        source = int(drawn.choice(len(SOURCES), p=(0.6, 0.3, 0.1)))
        name = int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
        index_D[row] = (len(tokens_N), len(content) + 1, source, offsets[source], name)
        tokens_N += [*content, END_OF_DOCUMENT]
        offsets[source] += len(content) + 12
    path, index = folder / f"shard-{number:05d}.npy", folder / f"shard-{number:05d}.idx.npy"
    np.save(path, np.array(tokens_N, dtype="<u2"))
    np.save(index, index_D)
    return {
        "name": path.name,
        "tokens": len(tokens_N),
        "documents": len(texts),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "index_sha256": hashlib.sha256(index.read_bytes()).hexdigest(),
        "min_id": min(tokens_N),
        "max_id": max(tokens_N),
    }


def _manifest(
    split: str,
    shards: list[dict[str, Any]],
    offsets: list[int],
    tokens: int,
    documents: int,
    tokenizer: bytes,
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "tool": "nviz demo",
        "command": "nviz demo",
        "split": split,
        "tokenizer": {
            "name": "bytes",
            "hash": hashlib.sha256(tokenizer).hexdigest(),
            "vocab_size": END_OF_DOCUMENT + 1,
            "end_of_document_id": END_OF_DOCUMENT,
        },
        "dtype": "uint16",
        "tokens": tokens,
        "documents": documents,
        "arguments": {"sources": list(SOURCES), "tokenizer": "bytes", "text_field": "text"},
        "counts": {
            "records_in": documents + 1,
            "documents_out": documents,
            "text_bytes": tokens - documents,
            "rejected": {"invalid-utf8": 1},
        },
        "shards": shards,
        "sources": [
            {"root": "demo", "name": name, "size": size, "sha256": "0" * 64}
            for name, size in zip(SOURCES, offsets, strict=True)
        ],
    }
