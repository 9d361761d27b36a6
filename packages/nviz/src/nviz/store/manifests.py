"""Token shards below the runs' root: finds their manifests, reads them, and opens their shards.

A data set is a folder with `manifest.json`: below a run in `data/<split>`, where run.json
says, or at the root and one to three levels below it. Keys are paths below the root, and only what
was found is opened, so neither an address nor a run reaches outside of it. A shard is mapped
only if its name is one that shards have and its header is that of a plain array.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nviz.store.folders import folders_in, key_below, search
from nviz.store.json_files import read_object
from nviz.store.parse import items, mapping, step_number, text
from nviz.store.plain import is_plain
from nviz.store.runs import Run, Signature, signature

MANIFEST = "manifest.json"
TRAIN = "train"
LARGEST_MANIFEST_BYTES = 64 * 2**20
SHARD = re.compile(r"shard-\d{5,9}\.npy")
INDEX_FIELDS = ("start", "length", "source", "offset", "id")
PASSED_OVER = frozenset({"metrics", "checkpoints", "data"})


@dataclass(frozen=True, slots=True)
class Shard:
    """What the manifest says about one shard."""

    name: str
    tokens: int
    documents: int
    min_id: int | None
    max_id: int | None
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """A file that documents came from: `root` is what was given to prep, `name` the path below."""

    root: str
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set's manifest, cleaned: every field has its type whatever the file held.

    `problem` says why nothing can be shown, or is None.
    """

    key: str
    folder: Path
    problem: str | None = None
    split: str = ""
    tool: str = ""
    command: str = ""
    tokens: int | None = None
    documents: int | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    sources: tuple[Source, ...] = ()


def find_datasets(root: Path, runs: Iterable[Run]) -> dict[str, Path]:
    """Folders of data sets by key, those of runs first."""
    found: dict[str, Path] = {}
    for folder in [*_of_runs(root, runs), *_training_first(_elsewhere(root))]:
        found.setdefault(key_below(root, folder), folder)
    return found


def datasets_of(root: Path, run: Run) -> dict[str, Path]:
    """The data sets that `run` was trained on and that lie below the root, by key."""
    return {key_below(root, folder): folder for folder in _of_runs(root, [run])}


def _of_runs(root: Path, runs: Iterable[Run]) -> Iterator[Path]:
    places: dict[Path, None] = {}
    for run in runs:
        # A relative one is as the trainer saw it: from beside the runs' root, or from in it.
        named = [root.parent / run.data_folder, root / run.data_folder] if run.data_folder else []
        places |= dict.fromkeys([run.folder / "data", *named])
    inside = root.resolve()
    for place in places:
        yield from _splits(root, inside, place)


def _splits(root: Path, inside: Path, place: Path) -> Iterator[Path]:
    """The data sets directly in `place`, if it lies below the root, and `place` itself."""
    try:
        resolved = place.resolve() if place.is_dir() else None
    except OSError:
        return
    if resolved is None or not resolved.is_relative_to(inside):
        return
    folder = root / resolved.relative_to(inside)
    for found in [folder, *_training_first(folders_in(folder, inside))]:
        if _is_dataset(found):
            yield found


def _is_dataset(folder: Path) -> bool:
    path = folder / MANIFEST
    return is_plain(path)


def _elsewhere(root: Path) -> Iterator[Path]:
    """Data sets at or below `root`; a run's own folders are looked at by `_of_runs`."""
    return search(
        root,
        _is_dataset,
        lambda folder: PASSED_OVER if is_plain(folder / "run.json") else (),
    )


def _training_first(folders: Iterable[Path]) -> list[Path]:
    """Sorted; of data sets beside one another the training split is the first."""
    return sorted(folders, key=lambda path: (path.parent, path.name != TRAIN, path.name))


def read_dataset(key: str, folder: Path) -> Dataset:
    """The manifest in `folder`; never raises for what it holds."""
    seen = signature(folder / MANIFEST)
    if seen is None:
        return Dataset(key, folder, "manifest.json is gone")
    return _read_dataset(key, folder, seen)


@lru_cache(maxsize=32)
def _read_dataset(key: str, folder: Path, seen: Signature) -> Dataset:
    """As `read_dataset`; kept while the file is unchanged."""
    value, problem = read_object(folder / MANIFEST, LARGEST_MANIFEST_BYTES)
    if problem is not None:
        return Dataset(key, folder, problem)
    return _parse(key, folder, value)


def _parse(key: str, folder: Path, value: dict[str, Any]) -> Dataset:
    return Dataset(
        key,
        folder,
        split=_text(value.get("split")),
        tool=_text(value.get("tool")),
        command=_text(value.get("command")),
        tokens=step_number(value.get("tokens")),
        documents=step_number(value.get("documents")),
        tokenizer=mapping(value.get("tokenizer")),
        counts=mapping(value.get("counts")),
        arguments=mapping(value.get("arguments")),
        shards=tuple(_shard(item) for item in _mappings(value.get("shards"))),
        sources=tuple(
            Source(_text(item.get("root")), _text(item.get("name")), step_number(item.get("size")))
            for item in _mappings(value.get("sources"))
        ),
    )


def _shard(item: dict[str, Any]) -> Shard:
    return Shard(
        name=_text(item.get("name")),
        tokens=step_number(item.get("tokens")) or 0,
        documents=step_number(item.get("documents")) or 0,
        min_id=step_number(item.get("min_id")),
        max_id=step_number(item.get("max_id")),
        sha256=_text(item.get("sha256")),
    )


def _text(value: object) -> str:
    return text(value, 2000) or ""


def _mappings(value: object) -> list[dict[str, Any]]:
    return [item for item in items(value) if isinstance(item, dict)]


def map_tokens(dataset: Dataset, shard: Shard) -> NDArray[Any]:
    """Token ids of a shard, one-dimensional uint16 or uint32, mapped and not read.

    Raises ValueError saying what is wrong with the file.
    """
    tokens = _mapped(dataset.folder, shard.name, shard.name)
    if tokens.dtype not in (np.dtype("<u2"), np.dtype("<u4")) or tokens.ndim != 1:
        raise ValueError(f"{shard.name} holds no token ids but {tokens.dtype}")
    return tokens


def map_index(dataset: Dataset, shard: Shard) -> NDArray[Any]:
    """The index of a shard: a row a document with the fields `INDEX_FIELDS`, mapped and not read.

    Raises ValueError saying what is wrong with the file.
    """
    name = shard.name.removesuffix(".npy") + ".idx.npy"
    index = _mapped(dataset.folder, shard.name, name)
    if index.dtype.names is None or not set(INDEX_FIELDS) <= set(index.dtype.names):
        raise ValueError(f"{name} is no index of documents")
    return index


def _mapped(folder: Path, shard: str, name: str) -> NDArray[Any]:
    path = folder / name
    if not SHARD.fullmatch(shard) or (path.exists() and not is_plain(path)):
        raise ValueError(f"the manifest names {shard[:100]!r}, which is no shard")
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{name} is not there") from None
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{name} cannot be read ({str(error)[:200]})") from error
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{name} is no array")
    return found
