"""What checkpoints a run has, and whether they are what they say: for people who ask."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe_train.checkpoint.folder import (
    COMPLETE,
    all_checkpoints,
    damages,
    read_checkpoint,
)
from nmoe_train.errors import TrainError


@dataclass(frozen=True)
class Listed:
    """One folder. `layout` and `tokens` are None where its meta.json is missing or damaged."""

    path: Path
    step: int
    status: str
    """`complete`, `unfinished` (does not exist for a resume), or `damaged`."""
    files: int
    size: int
    """Bytes of all its files."""
    layout: dict[str, Any] | None
    tokens: int | None


def list_checkpoints(place: Path) -> list[Listed]:
    """The checkpoints of a run folder, newest first; files are not read, but for meta.json.

    Raises TrainError `E-CHECKPOINT-NOT-FOUND` where there are none.
    """
    return [_listed(folder) for folder in _folders_of(place)]


def verify_checkpoints(place: Path) -> list[tuple[Path, list[str]]]:
    """What is wrong with each complete checkpoint of a run folder, or with the one at `place`.

    Every file is read. Raises TrainError `E-CHECKPOINT-NOT-FOUND` where none is complete, and
    `E-CHECKPOINT-VERSION`.
    """
    complete = [folder for folder in _folders_of(place) if (folder / COMPLETE).exists()]
    if not complete:
        raise _not_found(place, "no complete checkpoint")
    return [(folder, damages(folder)) for folder in complete]


def _folders_of(place: Path) -> list[Path]:
    if (place / "meta.json").exists() or (place / COMPLETE).exists():
        return [place]
    folders = all_checkpoints(place / "checkpoints") or all_checkpoints(place)
    if not folders:
        raise _not_found(place, "no checkpoint")
    return folders


def _not_found(place: Path, what: str) -> TrainError:
    return TrainError(
        "E-CHECKPOINT-NOT-FOUND",
        f"there is {what} in {place}",
        "name a run folder, or one of its checkpoints",
    )


def _listed(folder: Path) -> Listed:
    sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    meta: dict[str, Any] = {}
    status = "complete" if (folder / COMPLETE).exists() else "unfinished"
    if status == "complete":
        try:
            meta = read_checkpoint(folder).meta
        except TrainError:
            status = "damaged"
    digits = folder.name.removeprefix("step-")
    step = int(digits) if digits.isdecimal() else int(meta.get("step", 0))
    layout, tokens = meta.get("layout"), meta.get("tokens")
    return Listed(folder, step, status, len(sizes), sum(sizes), layout, tokens)
