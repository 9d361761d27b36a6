"""From token ids back to text, by the tokenizer that nmoe-data left beside the shards.

A data set's tokenizer is `tokenizer.json` in the folder above it. Bytes need nothing; a Hugging
Face tokenizer needs the package `tokenizers`, which nviz does not ask for. The manifest tells which
tokenizer made the shards by its hash: the SHA-256 of that file, followed by the end token for a
Hugging Face one. Another tokenizer would give plausible nonsense, so it is refused.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from nviz.errors import VizError
from nviz.store.manifests import Dataset
from nviz.store.parse import step_number
from nviz.store.plain import read_plain
from nviz.store.runs import Signature, signature

NAME = "tokenizer.json"
LARGEST_BYTES = 64 * 2**20
END_OF_DOCUMENT = "<|endoftext|>"

Decoder = Callable[[Sequence[int]], str]


def open_decoder(root: Path, dataset: Dataset) -> Decoder:
    """The function that turns ids of `dataset` into text; what is no UTF-8 becomes U+FFFD.

    Raises VizError: `E-TOKENIZER-MISSING` if there is none below `root`, `E-TOKENIZER-INVALID` if
    it cannot be read, `E-TOKENIZER-DRIFT` if it is not the one that made the shards,
    `E-TOKENIZER-PACKAGE` if the package that reads it is not installed.
    """
    path = dataset.folder.resolve().parent / NAME
    seen = signature(path)
    if not path.is_relative_to(root.resolve()) or path.is_symlink() or seen is None:
        raise VizError(
            "E-TOKENIZER-MISSING",
            f"there is no {NAME} in the folder above {dataset.key}",
            "serve a folder that holds both, as nmoe-data prep leaves them",
        )
    wanted = dataset.tokenizer.get("hash")
    end = step_number(dataset.tokenizer.get("end_of_document_id"))
    return _open(path, seen, wanted if isinstance(wanted, str) else "", end)


@lru_cache(maxsize=4)
def _open(path: Path, seen: Signature, wanted: str, end: int | None) -> Decoder:
    content = _content(path)
    if _is_bytes(content, path):
        _check(path, hashlib.sha256(content).hexdigest(), wanted)
        return _decode_bytes
    return _huggingface(path, content, wanted, end)


def _content(path: Path) -> bytes:
    try:
        content = read_plain(path, LARGEST_BYTES)
    except OSError as error:
        raise _invalid(path, error.strerror or str(error)) from error
    if content is None:
        raise _invalid(path, "it is larger than 64 MiB")
    return content


def _is_bytes(content: bytes, path: Path) -> bool:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, "it is no whole JSON") from error
    return isinstance(value, dict) and value.get("type") == "nmoe-bytes"


def _decode_bytes(ids: Sequence[int]) -> str:
    parts = (bytes((i,)) if i < 256 else END_OF_DOCUMENT.encode() for i in ids)
    return b"".join(parts).decode(errors="replace")


def _huggingface(path: Path, content: bytes, wanted: str, end: int | None) -> Decoder:
    try:
        import tokenizers
    except ImportError as error:
        raise VizError(
            "E-TOKENIZER-PACKAGE",
            f"{path.name} is a Hugging Face tokenizer, and the package tokenizers is not installed",
            "pip install tokenizers, and start nviz again",
        ) from error
    try:
        inner: Any = tokenizers.Tokenizer.from_str(content.decode())
    # The library raises bare Exception for a bad file.
    except Exception as error:
        raise _invalid(path, " ".join(str(error).split())[:200]) from error
    last = inner.id_to_token(end) if end is not None and end < 2**32 else None
    _check(path, hashlib.sha256(content + (last or "").encode()).hexdigest(), wanted)
    return lambda ids: str(inner.decode(list(ids), skip_special_tokens=False))


def _check(path: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise VizError(
            "E-TOKENIZER-DRIFT",
            f"{path.parent.name}/{path.name} is not the tokenizer that made these shards",
            "put back the tokenizer.json that nmoe-data prep wrote",
        )


def _invalid(path: Path, why: str) -> VizError:
    return VizError(
        "E-TOKENIZER-INVALID",
        f"{path.parent.name}/{path.name} cannot be read ({why})",
        "put back the tokenizer.json that nmoe-data prep wrote",
    )
