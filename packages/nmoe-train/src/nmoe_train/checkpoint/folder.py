"""Checkpoint folders on disk, as the run-folder format says.

`step-00001000/` holds one safetensors file per writing rank, `meta.json` (what the state belongs
to, every tensor's place, a sha256 per file) and, last, `COMPLETE`, which holds the sha256 of
`meta.json`. A tensor that several ranks wrote stands in each one's file by its name, in part, and
`meta.json` says which part, so that a reader takes what it needs of any of them. A folder without
`COMPLETE` does not exist for readers, so a writer may die anywhere. Files are flushed to the disk
before it appears, and older folders are removed only after that. Rank 0 makes the folder, and
completes it once every rank's file is there; it alone removes anything. The newest checkpoint is
found by looking, and verified before it is trusted.
"""

import errno
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from nmoe_data.files import atomic_write, sync_path
from safetensors import safe_open
from torch import Tensor

from nmoe_train.checkpoint.body import Body
from nmoe_train.errors import TrainError
from nmoe_train.model.box import Box, whole_box
from nmoe_train.parallel.groups import ALONE, Groups
from nmoe_train.parallel.letters import Letters
from nmoe_train.storage.folders import (
    COMPLETE,
    CORRUPT,
    META,
    SCHEMA_VERSION,
    all_checkpoints,
    complete_checkpoints,
    corrupt,
    read_meta,
    step_of,
    verify,
)

ROOM = 1.5

Fetch = Callable[[], tuple[str | None, list[str]]]


class Mirrored(Protocol):
    """What is known of the mirror while a run goes on."""

    newest: int
    """Step of the newest checkpoint that is complete there as here; 0 if none is."""

    def tell(self, what: str) -> None:
        """Something that the user should know; from any thread."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder and what its meta.json says."""

    path: Path
    step: int
    meta: dict[str, Any]

    def tensors(self) -> "SavedTensors":
        """All tensors by name; each is read, onto the CPU, when it is asked for."""
        return SavedTensors(self.path, self.meta["tensors"])


def write_checkpoint(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    keep: int,
    groups: Groups | Letters = ALONE,
    boxes: Mapping[str, Box] | None = None,
    limit: float | None = None,
    mirror: Mirrored | None = None,
) -> Path:
    """Writes the state after `step` steps and removes all but the newest `keep` complete folders.

    With a mirror, older ones stay until one that is newer than they is complete there too, unless
    the disk has no room for the next save.

    `tensors` are those that this rank writes, and `boxes` says which part of a tensor that is, for
    those that others write too; parts do not overlap. A rank that has none writes no file. `limit`:
    bytes that a rank writes in a second, at most. With Groups the ranks meet in collectives, with
    Letters they do not, and any thread may write. Raises
    OSError when the disk is full or forbidden, and TrainError `E-PEER` where that befell another
    rank; what was complete before stays so.
    """
    folder = root / f"step-{step:08d}"
    groups.first_does(lambda: _make_empty(folder))
    try:
        bodies = groups.all_do(
            lambda: _write_body(folder, groups.layout.rank, tensors, boxes or {}, limit)
        )
        groups.first_does(lambda: _complete(folder, step, meta, bodies))
    except BaseException:
        # Half a checkpoint helps nobody, least of all on a full disk. One that is complete stays,
        # though a peer was lost just then.
        if groups.first and _may_act(groups) and not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    groups.first_does(lambda: _settle(root, step, keep, mirror))
    return folder


def newest_sound_checkpoint(
    root: Path, groups: Groups = ALONE, fetch: Fetch | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are what meta.json says, and what is wrong with newer ones.

    Rank 0 looks and verifies; all ranks get the same answer. Where none is sound, `fetch` brings
    one from elsewhere: it returns its name, if there is one, and what was wrong there.
    Raises TrainError `E-CHECKPOINT-CORRUPT` when there are complete folders and none is sound, and
    `E-CHECKPOINT-VERSION` when a newer nmoe-train wrote the newest.
    """
    name, problems = groups.first_does(lambda: _newest_sound(root, fetch))
    return (None if name is None else read_checkpoint(root / name)), problems


def _newest_sound(root: Path, fetch: Fetch | None) -> tuple[str | None, list[str]]:
    """Name of the newest folder that is sound, if any, and what is wrong with newer ones."""
    problems: list[str] = []
    for folder in complete_checkpoints(root):
        try:
            verify(folder)
        except TrainError as error:
            if error.code != CORRUPT:
                raise
            problems.append(str(error))
        else:
            return folder.name, problems
    if fetch is not None:
        name, odd = fetch()
        problems += odd
        if name is not None:
            return name, problems
    if problems:
        raise TrainError(
            CORRUPT,
            f"none of the {len(problems)} checkpoints under {root} is sound ({problems[0]})",
            "restore one from a copy, or start again in another run folder",
        )
    return None, []


def read_checkpoint(folder: Path) -> Checkpoint:
    """A complete folder, whose meta.json is what COMPLETE says.

    Raises TrainError `E-CHECKPOINT-CORRUPT` and `E-CHECKPOINT-VERSION`.
    """
    meta = read_meta(folder)
    return Checkpoint(folder, int(meta["step"]), meta)


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, whose files are opened when they are first needed."""

    def __init__(self, folder: Path, places: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._places = folder, places
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, whole_box(self.shape(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self._places[name]["shape"])

    def part(self, name: str, box: Box) -> Tensor:
        """What of a tensor is in a box; no more than that is read.

        Raises TrainError `E-CHECKPOINT-CORRUPT` where the tensor's pieces leave a part of it out.
        """
        place = self._places[name]
        if "file" in place:
            tensor: Tensor = self._file(place["file"]).get_slice(name)[box.slices()]
            return tensor
        out = torch.empty(box.shape, dtype=getattr(torch, place["dtype"]))
        missing = out.numel()
        for piece in place["pieces"]:
            there = Box(tuple(piece["start"]), tuple(piece["shape"]), box.whole)
            shared = box.overlap(there)
            if shared is not None:
                source = self._file(piece["file"]).get_slice(name)
                shared.within(box).of(out).copy_(source[shared.within(there).slices()])
                missing -= math.prod(shared.shape)
        if missing:
            raise corrupt(self._folder / META, f"does not list all pieces of {name}")
        return out

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, framework="pt")
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _may_act(groups: Groups | Letters) -> bool:
    """Whether the folder is still this run's to change; others may be writing to it by now."""
    try:
        groups.guard()
    except Exception:
        # The failure that led here is raised; this one would only hide it.
        return False
    return True


def _make_empty(folder: Path) -> None:
    if folder.exists():
        # Unfinished, or found damaged by the resume that led here again.
        _remove(folder)
    folder.mkdir(parents=True)


def _write_body(
    folder: Path,
    rank: int,
    tensors: Mapping[str, Tensor],
    boxes: Mapping[str, Box],
    limit: float | None,
) -> dict[str, Any] | None:
    """Writes a rank's file; what meta.json says of it, or None if there is nothing to write."""
    if not tensors:
        return None
    file = folder / f"rank-{rank:05d}.safetensors"
    body = Body(tensors, limit)
    _save_tensors(file, body)
    if not body.is_on_disk(file):
        raise OSError(errno.EIO, "what was read back is not what was written", str(file))
    return {
        "file": file.name,
        "sha256": body.sha256,
        "bytes": file.stat().st_size,
        "tensors": {
            name: _place(file.name, tensor, boxes.get(name)) for name, tensor in tensors.items()
        },
    }


def _place(file: str, tensor: Tensor, box: Box | None) -> dict[str, Any]:
    """What meta.json says of a tensor, or, with a box, of the part that is in a file."""
    dtype = str(tensor.dtype)[6:]
    if box is None:
        return {"file": file, "shape": list(tensor.shape), "dtype": dtype}
    piece = {"file": file, "start": list(box.start), "shape": list(box.shape)}
    return {"shape": list(box.whole), "dtype": dtype, "pieces": [piece]}


def _all_places(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where every tensor is, with all of its pieces."""
    places: dict[str, Any] = {}
    for body in bodies:
        for name, place in body["tensors"].items():
            if name in places:
                places[name]["pieces"] += place["pieces"]
            else:
                places[name] = place
    return places


def _complete(
    folder: Path, step: int, meta: Mapping[str, Any], bodies: Sequence[dict[str, Any] | None]
) -> None:
    """Writes meta.json and, last, `COMPLETE`, once the files of all ranks are there."""
    written = [body for body in bodies if body is not None]
    for body in written:
        _check_is_here(folder / body["file"], body["bytes"])
    content = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        **meta,
        "files": {b["file"]: {"sha256": b["sha256"], "bytes": b["bytes"]} for b in written},
        "tensors": _all_places(written),
    }
    encoded = json.dumps(content, indent=1).encode()
    atomic_write(folder / META, encoded)
    atomic_write(folder / COMPLETE, hashlib.sha256(encoded).hexdigest().encode())


def _check_is_here(file: Path, size: int) -> None:
    """Raises TrainError unless rank 0 sees the file that a rank says it wrote."""
    if file.exists() and file.stat().st_size == size:
        return
    raise TrainError(
        "E-CHECKPOINT-SHARED",
        f"rank 0 does not see {file}, which another rank wrote",
        "put run.dir on a file system that all hosts share",
    )


def _settle(root: Path, step: int, keep: int, mirror: Mirrored | None) -> None:
    """Flushes the names of a complete checkpoint, and only then removes older ones."""
    sync_path(root)
    sync_path(root.parent)
    remove_older(root, step, keep, mirror)


def remove_older(root: Path, step: int, keep: int, mirror: Mirrored | None = None) -> None:
    """Leaves the folder of `step` and the `keep` - 1 complete ones before it.

    Later folders stay: they were found damaged, and are no reason to give up a sound one. With a
    mirror, older complete ones stay too, until it has one that is newer than they; but where the
    disk has no room for one more, the oldest go, and that is told.
    """
    older = [folder for folder in all_checkpoints(root) if step_of(folder.name) < step]
    complete = [folder for folder in older if (folder / COMPLETE).exists()]
    for folder in reversed(older):
        if folder in complete[: keep - 1]:
            continue
        if folder in complete and mirror is not None and step_of(folder.name) >= mirror.newest:
            if _has_room(root / f"step-{step:08d}"):
                continue
            mirror.tell(f"the disk is full: {folder.name} is removed, and no newer one is mirrored")
        _remove(folder)


def _has_room(folder: Path) -> bool:
    """Whether the disk has space for a folder as large as this one, and half of that to spare."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    return shutil.disk_usage(folder).free > ROOM * size


def _save_tensors(file: Path, body: Body) -> None:
    body.write(file)


def _remove(folder: Path) -> None:
    """Removes a folder so that it is invisible from the first moment on."""
    (folder / COMPLETE).unlink(missing_ok=True)
    sync_path(folder)
    shutil.rmtree(folder)
