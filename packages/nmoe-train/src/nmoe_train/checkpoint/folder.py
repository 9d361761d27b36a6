"""Checkpoint folders on disk, as the run-folder format says.

`step-00001000/` holds one safetensors file per writing rank, `meta.json` (what the state belongs
to, every tensor's place, a sha256 per file) and, last, `COMPLETE`, which holds the sha256 of
`meta.json`. A folder without it does not exist for readers, so a writer may die anywhere. Files are
flushed to the disk before `COMPLETE` appears, and older folders are removed only after that. The
newest checkpoint is found by looking, and verified before it is trusted.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe_data.files import atomic_write, sha256_file, sync_path
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe_train.errors import TrainError

SCHEMA_VERSION = 1
COMPLETE = "COMPLETE"
CORRUPT = "E-CHECKPOINT-CORRUPT"
FOLDER_NAME = re.compile(r"step-\d{8}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder and what its meta.json says."""

    path: Path
    step: int
    meta: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, on the CPU."""
        loaded: dict[str, Tensor] = {}
        for file in self.meta["files"]:
            loaded |= load_file(self.path / file)
        return loaded


def write_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, keep: int
) -> Path:
    """Writes the state after `step` steps and removes all but the newest `keep` complete folders.

    Raises OSError when the disk is full or forbidden; what was complete before stays so.
    """
    folder = root / f"step-{step:08d}"
    if folder.exists():
        # Unfinished, or found damaged by the resume that led here again.
        _remove(folder)
    folder.mkdir(parents=True)
    try:
        _fill(folder, step, tensors, meta)
    except BaseException:
        # Half a checkpoint helps nobody, least of all on a full disk.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_path(root)
    sync_path(root.parent)
    _remove_older(root, step, keep)
    return folder


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint folders under `root`, newest first."""
    return [folder for folder in _folders(root) if (folder / COMPLETE).exists()]


def newest_sound_checkpoint(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are what meta.json says, and what is wrong with newer ones.

    Raises TrainError `E-CHECKPOINT-CORRUPT` when there are complete folders and none is sound, and
    `E-CHECKPOINT-VERSION` when a newer nmoe-train wrote the newest.
    """
    problems: list[str] = []
    for folder in complete_checkpoints(root):
        try:
            return _open_verified(folder), problems
        except TrainError as error:
            if error.code != CORRUPT:
                raise
            problems.append(str(error))
    if problems:
        raise TrainError(
            CORRUPT,
            f"none of the {len(problems)} checkpoints under {root} is sound ({problems[0]})",
            "restore one from a copy, or start again in another run folder",
        )
    return None, []


def _open_verified(folder: Path) -> Checkpoint:
    try:
        content = (folder / "meta.json").read_bytes()
        wanted = (folder / COMPLETE).read_bytes()
        if hashlib.sha256(content).hexdigest().encode() != wanted:
            raise _corrupt(folder / "meta.json", "does not have the checksum in COMPLETE")
        meta = json.loads(content)
        files: dict[str, dict[str, Any]] = meta["files"]
        step, version = int(meta["step"]), int(meta["schema_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _corrupt(folder / "meta.json", f"cannot be read ({error})") from None
    if version != SCHEMA_VERSION:
        raise TrainError(
            "E-CHECKPOINT-VERSION",
            f"{folder} has format {version}, and this nmoe-train reads {SCHEMA_VERSION}",
            "use the version of nmoe-train that wrote it",
        )
    for name, entry in files.items():
        try:
            sound = sha256_file(folder / name) == entry["sha256"]
        except OSError as error:
            raise _corrupt(folder / name, f"cannot be read ({error.strerror})") from None
        if not sound:
            raise _corrupt(folder / name, "does not have the checksum in meta.json")
    return Checkpoint(folder, step, meta)


def _fill(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Writes the files of a checkpoint into an empty folder, `COMPLETE` last."""
    file = folder / "rank-00000.safetensors"
    _save_tensors(file, tensors)
    content = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        **meta,
        "files": {file.name: {"sha256": sha256_file(file), "bytes": file.stat().st_size}},
        "tensors": {
            name: {"file": file.name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]}
            for name, tensor in tensors.items()
        },
    }
    encoded = json.dumps(content, indent=1).encode()
    atomic_write(folder / "meta.json", encoded)
    atomic_write(folder / COMPLETE, hashlib.sha256(encoded).hexdigest().encode())


def _remove_older(root: Path, step: int, keep: int) -> None:
    """Leaves the folder of `step` and the `keep` - 1 complete ones before it.

    Later folders stay: they were found damaged, and are no reason to give up a sound one.
    """
    older = [folder for folder in _folders(root) if _step_of(folder) < step]
    complete = [folder for folder in older if (folder / COMPLETE).exists()]
    for folder in older:
        if folder not in complete[: keep - 1]:
            _remove(folder)


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, complete or not, newest first."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if FOLDER_NAME.fullmatch(p.name)), reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _corrupt(path: Path, what: str) -> TrainError:
    return TrainError(CORRUPT, f"{path} {what}", "an older checkpoint is used where there is one")


def _save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:
        # The library wraps the system's error in text; the number in it is the errno.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number.group(1)), str(error), str(file)) from error
    sync_path(file)


def _remove(folder: Path) -> None:
    """Removes a folder so that it is invisible from the first moment on."""
    (folder / COMPLETE).unlink(missing_ok=True)
    sync_path(folder)
    shutil.rmtree(folder)
