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

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe_train.errors import TrainError
from nmoe_train.files import fsync_path, sha256_of, write_bytes_atomic

SCHEMA_VERSION = 1
COMPLETE = "COMPLETE"
FOLDER_NAME = re.compile(r"step-(\d{8})")


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
    file = folder / "rank-00000.safetensors"
    _save_tensors(file, tensors)
    content = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        **meta,
        "files": {file.name: {"sha256": sha256_of(file), "bytes": file.stat().st_size}},
        "tensors": {
            name: {"file": file.name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]}
            for name, tensor in tensors.items()
        },
    }
    encoded = json.dumps(content, indent=1).encode()
    write_bytes_atomic(folder / "meta.json", encoded)
    write_bytes_atomic(folder / COMPLETE, hashlib.sha256(encoded).hexdigest().encode())
    fsync_path(root)
    for old in complete_checkpoints(root)[keep:]:
        _remove(old)
    return folder


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint folders under `root`, newest first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if FOLDER_NAME.fullmatch(path.name)]
    return sorted((path for path in folders if (path / COMPLETE).exists()), reverse=True)


def newest_sound_checkpoint(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are what meta.json says, and what is wrong with newer ones.

    Raises TrainError `E-CHECKPOINT-CORRUPT` when there are complete folders and none is sound.
    """
    problems: list[str] = []
    for folder in complete_checkpoints(root):
        try:
            return _open_verified(folder), problems
        except TrainError as error:
            problems.append(str(error))
    if problems:
        raise TrainError(
            "E-CHECKPOINT-CORRUPT",
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
        if not (folder / name).is_file():
            raise _corrupt(folder / name, "is missing")
        if sha256_of(folder / name) != entry["sha256"]:
            raise _corrupt(folder / name, "does not have the checksum in meta.json")
    return Checkpoint(folder, step, meta)


def _corrupt(path: Path, what: str) -> TrainError:
    return TrainError(
        "E-CHECKPOINT-CORRUPT", f"{path} {what}", "an older checkpoint is used where there is one"
    )


def _save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:
        # The library wraps the system's error in text; the number in it is the errno.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number.group(1)), str(error), str(file)) from error
    fsync_path(file)


def _remove(folder: Path) -> None:
    """Removes a folder so that it is invisible from the first moment on."""
    (folder / COMPLETE).unlink(missing_ok=True)
    fsync_path(folder)
    shutil.rmtree(folder)
