"""What checkpoints a run has, here or at a URL, and whether they are what they say: for people."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nmoe_train.errors import TrainError
from nmoe_train.storage.folders import (
    COMPLETE,
    CORRUPT,
    FOLDER_NAME,
    META,
    all_checkpoints,
    damages,
    read_meta,
)
from nmoe_train.storage.mirror import Mirror
from nmoe_train.storage.target import Target, is_url, reason

Result = TypeVar("Result")

PATIENCE_S = 15.0


@dataclass(frozen=True)
class Listed:
    """One folder. `layout` and `tokens` are None where its meta.json is missing or not read."""

    name: str
    step: int
    status: str
    """`complete`, `unfinished` (does not exist for a resume), `damaged`, or `other format` (of
    another version of nmoe-train, which alone reads it)."""
    files: int
    size: int
    """Bytes of all its files."""
    layout: dict[str, Any] | None
    tokens: int | None


def list_checkpoints(place: str | Path) -> list[Listed]:
    """The checkpoints of a run folder or URL, newest first; of files only meta.json is read.

    Raises TrainError `E-CHECKPOINT-NOT-FOUND` where there are none, `E-MIRROR` where a storage does
    not answer.
    """
    if is_url(str(place)):
        return _asked(str(place), _list_mirror)
    return [_listed(folder) for folder in folders_of(Path(place))]


def verify_checkpoints(place: str | Path) -> list[tuple[str, list[str]]]:
    """What is wrong with each complete checkpoint of a run folder or URL, or the one at `place`.

    Every file is read. Raises TrainError `E-CHECKPOINT-NOT-FOUND` where none is complete,
    `E-CHECKPOINT-VERSION`, and `E-MIRROR` where a storage does not answer.
    """
    if is_url(str(place)):
        return _asked(str(place), _verify_mirror)
    complete = [folder for folder in folders_of(Path(place)) if (folder / COMPLETE).exists()]
    if not complete:
        raise not_found(place, "no complete checkpoint")
    return [(folder.name, damages(folder)) for folder in complete]


def _asked(url: str, ask: Callable[[Mirror, list[str]], Result]) -> Result:
    """What a storage answers about the folders at a URL."""
    try:
        mirror, names = _mirror_of(url)
        if not names:
            raise not_found(url, "no checkpoint")
        return ask(mirror, names)
    except TrainError:
        raise
    # Each storage raises kinds of its own.
    except Exception as error:
        raise TrainError(
            "E-MIRROR", f"{url}: {reason(error)}", "check the address, credentials and network"
        ) from error


def _mirror_of(url: str) -> tuple[Mirror, list[str]]:
    """Where checkpoints are at a URL, and their names: its own, or those in it."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if FOLDER_NAME.fullmatch(name):
        mirror = Mirror(Target(parent, PATIENCE_S))
        return mirror, [name] if name in mirror.folders() else []
    inner = Mirror(Target(f"{url.rstrip('/')}/checkpoints", PATIENCE_S))
    if found := inner.folders():
        return inner, found
    mirror = Mirror(Target(url, PATIENCE_S))
    return mirror, mirror.folders()


def _list_mirror(mirror: Mirror, names: list[str]) -> list[Listed]:
    return [_entry(name, mirror.target.sizes(name), partial(mirror.meta, name)) for name in names]


def _verify_mirror(mirror: Mirror, names: list[str]) -> list[tuple[str, list[str]]]:
    complete = set(mirror.complete())
    found = [name for name in names if name in complete]
    if not found:
        raise not_found(mirror.url, "no complete checkpoint")
    return [(name, mirror.damages(name)) for name in found]


def folders_of(place: Path) -> list[Path]:
    """The checkpoint folders of a run folder, newest first, or the one at `place`.

    Raises TrainError `E-CHECKPOINT-NOT-FOUND`.
    """
    if (place / META).exists() or (place / COMPLETE).exists():
        return [place]
    folders = all_checkpoints(place / "checkpoints") or all_checkpoints(place)
    if not folders:
        raise not_found(place, "no checkpoint")
    return folders


def not_found(place: str | Path, what: str) -> TrainError:
    """The error of a place that has no checkpoint."""
    return TrainError(
        "E-CHECKPOINT-NOT-FOUND",
        f"there is {what} in {place}",
        "name a run folder, or one of its checkpoints",
    )


def _listed(folder: Path) -> Listed:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return _entry(folder.name, sizes, lambda: read_meta(folder))


def _entry(name: str, sizes: dict[str, int], read: Callable[[], dict[str, Any]]) -> Listed:
    """A folder with files of these sizes; `read` gives its meta.json where it is complete."""
    meta: dict[str, Any] = {}
    status = "complete" if COMPLETE in sizes else "unfinished"
    if status == "complete":
        try:
            meta = read()
        except TrainError as error:
            status = "damaged" if error.code == CORRUPT else "other format"
    digits = name.removeprefix("step-")
    step = int(digits) if digits.isdecimal() else int(meta.get("step", 0))
    layout, tokens = meta.get("layout"), meta.get("tokens")
    return Listed(name, step, status, len(sizes), sum(sizes.values()), layout, tokens)
