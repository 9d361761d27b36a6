"""Checkpoint folders of a run: which are complete, what they hold, how large they are.

`checkpoints/step-00001000/` holds a safetensors file per writing rank, `meta.json` and, last,
`COMPLETE` with the SHA-256 of `meta.json`. A folder without it is unfinished. The files themselves
are only measured, never opened: what `meta.json` says of their sizes is compared with the disk.
"""

import hashlib
import math
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from nviz.store.parse import parse_json, step_number
from nviz.store.plain import open_plain, read_plain
from nviz.store.runs import Signature, signature

NAME = re.compile(r"step-(\d{8,18})")
LARGEST_META_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file of a checkpoint. `bytes` is its size on disk, None where it is missing; `expected` and
    `sha256` are what meta.json says, None where it says nothing."""

    name: str
    bytes: int | None
    expected: int | None = None
    sha256: str | None = None

    @property
    def problem(self) -> str | None:
        """What is wrong with it, or None."""
        if self.bytes is None:
            return "missing"
        if self.expected is not None and self.bytes != self.expected:
            return "another size than meta.json says"
        return None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's place: its file, shape and dtype, as meta.json says."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One folder. `state` is "complete", "unfinished" or "damaged", and then `problem` says why.

    `written_unix_s` is when the newest of its files was written.
    """

    name: str
    step: int
    state: str
    problem: str | None
    written_unix_s: float
    files: tuple[CheckpointFile, ...] = ()
    tokens: int | None = None
    fingerprint: str | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all its files on disk."""
        return sum(file.bytes or 0 for file in self.files)


@dataclass(frozen=True, slots=True)
class _Meta:
    digest: str
    files: tuple[tuple[str, int | None, str | None], ...] = ()
    tokens: int | None = None
    fingerprint: str | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()


def list_checkpoints(run_folder: Path) -> list[Checkpoint]:
    """The checkpoint folders of a run, the newest step first; empty if there are none.

    Links are passed over: they could lead out of the runs' root.
    """
    inside = run_folder / "checkpoints"
    if inside.is_symlink():
        return []
    try:
        with os.scandir(inside) as entries:
            folders = [
                Path(entry.path)
                for entry in entries
                if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
    found = [read_checkpoint(folder) for folder in folders]
    return sorted(found, key=lambda item: item.step, reverse=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """What is in one folder; never raises for what it holds."""
    sizes, written = _sizes(folder)
    state, problem, meta = _judged(folder)
    named = {name: (expected, digest) for name, expected, digest in meta.files}
    files = tuple(
        CheckpointFile(name, sizes.get(name), *named.get(name, (None, None)))
        for name in sorted(sizes.keys() | named.keys())
    )
    wrong = next((f"{file.name}: {file.problem}" for file in files if file.problem), None)
    if state == "complete" and wrong:
        state, problem = "damaged", wrong
    return Checkpoint(
        name=folder.name,
        step=int(folder.name.removeprefix("step-")),
        state=state,
        problem=problem,
        written_unix_s=written,
        files=files,
        tokens=meta.tokens,
        fingerprint=meta.fingerprint,
        layout=meta.layout,
        tensors=meta.tensors,
    )


def _sizes(folder: Path) -> tuple[dict[str, int], float]:
    """Size by name of the plain files, and when the newest was written."""
    sizes, written = {}, 0.0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    found = entry.stat()
                    sizes[entry.name] = found.st_size
                    written = max(written, found.st_mtime)
    except OSError:
        pass
    return sizes, written


def _judged(folder: Path) -> tuple[str, str | None, _Meta]:
    """State, what is wrong, and what meta.json says as far as it can be read."""
    seen = signature(folder / "meta.json")
    meta, unreadable = (
        _read_meta(folder / "meta.json", seen) if seen else (None, "meta.json is not there")
    )
    try:
        with open_plain(folder / "COMPLETE") as file:
            wanted = file.read(128).decode(errors="replace").strip()
    except OSError:
        return "unfinished", "COMPLETE is not there", meta or _Meta("")
    if meta is None:
        return "damaged", unreadable, _Meta("")
    if meta.digest != wanted:
        return "damaged", "meta.json has another checksum than COMPLETE says", meta
    return "complete", None, meta


@lru_cache(maxsize=16)
def _read_meta(path: Path, seen: Signature) -> tuple[_Meta | None, str | None]:
    """What meta.json says and None, or None and why it cannot be read; kept while unchanged."""
    try:
        content = read_plain(path, LARGEST_META_BYTES)
        if content is None:
            return None, "meta.json is larger than 256 MiB"
        value = parse_json(content)
    except OSError as error:
        return None, f"meta.json: {error.strerror or error}"
    except ValueError:
        return None, "meta.json is no whole JSON"
    if not isinstance(value, dict):
        return None, "meta.json holds no JSON object"
    fingerprint = value.get("fingerprint")
    layout = value.get("layout")
    return (
        _Meta(
            digest=hashlib.sha256(content).hexdigest(),
            files=tuple(_file(name, item) for name, item in _items(value.get("files"))),
            tokens=step_number(value.get("tokens")),
            fingerprint=fingerprint if isinstance(fingerprint, str) else None,
            layout=layout if isinstance(layout, dict) else {},
            tensors=tuple(_tensor(name, item) for name, item in _items(value.get("tensors"))),
        ),
        None,
    )


def _items(value: object) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(value, dict):
        return []
    return [(name, item) for name, item in value.items() if isinstance(item, dict)]


def _file(name: str, item: dict[str, Any]) -> tuple[str, int | None, str | None]:
    digest = item.get("sha256")
    return name, step_number(item.get("bytes")), digest if isinstance(digest, str) else None


def _tensor(name: str, item: dict[str, Any]) -> Tensor:
    shape = item.get("shape")
    sizes = [step_number(size) or 0 for size in shape] if isinstance(shape, list) else []
    pieces = item.get("pieces")
    places = [item] if not isinstance(pieces, list) else pieces
    files = [str(place.get("file", "?")) for place in places if isinstance(place, dict)]
    more = f" and {len(files) - 1} more" if files[1:] else ""
    return Tensor(name, (files or ["?"])[0] + more, tuple(sizes), str(item.get("dtype", "?")))
