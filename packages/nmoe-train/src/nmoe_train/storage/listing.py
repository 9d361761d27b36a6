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
    OTHER_FORMAT,
    all_checkpoints,
    damages,
    read_meta,
)
from nmoe_train.storage.mirror import Mirror
from nmoe_train.storage.target import Target, is_url, reason, shown

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


@dataclass(frozen=True)
class Verified:
    """A complete folder; `problems` has an error for each damaged file, or for the format."""

    name: str
    status: str
    """`sound`, `damaged`, or `other format`, whose files are not read."""
    problems: list[str]


def verify_checkpoints(place: str | Path) -> list[Verified]:
    """Reads every file of each complete checkpoint of a run folder or URL, or of the one there.

    Raises TrainError `E-CHECKPOINT-NOT-FOUND` where none is complete, `E-MIRROR` where a storage
    does not answer.
    """
    if is_url(str(place)):
        return _asked(str(place), _verify_mirror)
    folders = complete_of(Path(place))
    return [_verified(folder.name, partial(damages, folder)) for folder in folders]


def fetch_checkpoint(url: str, root: Path, tell: Callable[[str], None]) -> Path:
    """Copies the newest complete checkpoint at a URL, or the one that it names, to the folder
    `root`, verified; its folder there. `tell` shows a line to the user.

    Raises TrainError `E-CHECKPOINT-CORRUPT` where it is damaged, what `verify_checkpoints` does,
    `E-CHECKPOINT-VERSION`, and OSError of the disk.
    """

    def fetch(mirror: Mirror, names: list[str]) -> Path | OSError:
        newest, *_ = _complete(mirror, names)
        tell(f"fetching {newest} from {mirror.url}")
        try:
            mirror.fetch(newest, root, lambda: None)
        except OSError as error:
            if str(root) in str(error.filename):
                return error
            raise
        return root / newest

    fetched = _asked(url, fetch)
    if isinstance(fetched, OSError):
        raise fetched
    return fetched


def _asked(url: str, ask: Callable[[Mirror, list[str]], Result]) -> Result:
    """What a storage answers about the folders at a URL."""
    try:
        mirror, names = _mirror_of(url)
        if not names:
            raise not_found(shown(url), "no checkpoint")
        return ask(mirror, names)
    except TrainError:
        raise
    # Each storage raises kinds of its own.
    except Exception as error:
        raise TrainError(
            "E-MIRROR",
            f"{shown(url)}: {reason(error)}",
            "check the address, credentials and network",
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


def _verify_mirror(mirror: Mirror, names: list[str]) -> list[Verified]:
    return [_verified(name, partial(mirror.damages, name)) for name in _complete(mirror, names)]


def _complete(mirror: Mirror, names: list[str]) -> list[str]:
    """Those of the names, newest first, that are complete, at least one."""
    complete = set(mirror.complete())
    found = [name for name in names if name in complete]
    if not found:
        raise not_found(mirror.url, "no complete checkpoint")
    return found


def _verified(name: str, read: Callable[[], list[str]]) -> Verified:
    """What `read` finds wrong with the files of a folder."""
    try:
        problems = read()
    except TrainError as error:
        if error.code != OTHER_FORMAT:
            raise
        return Verified(name, "other format", [str(error)])
    return Verified(name, "damaged" if problems else "sound", problems)


def complete_of(place: Path) -> list[Path]:
    """Those of `folders_of` that are complete, at least one.

    Raises TrainError `E-CHECKPOINT-NOT-FOUND`.
    """
    complete = [folder for folder in folders_of(place) if (folder / COMPLETE).exists()]
    if not complete:
        raise not_found(place, "no complete checkpoint")
    return complete


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
