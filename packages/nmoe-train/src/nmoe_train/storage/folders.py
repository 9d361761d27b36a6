"""Reading checkpoint folders: which there are, which are complete, and whether their files are so.

`step-00001000/` holds the bodies, `meta.json` with a sha256 for each, and `COMPLETE` with the
sha256 of `meta.json`. What is complete is found by looking, and verified before it is trusted.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nmoe_data.files import sha256_file

from nmoe_train.errors import TrainError

Result = TypeVar("Result")

SCHEMA_VERSION = 3
"""Version 3 keeps an expert's gate and up apart; those before it are not read."""
COMPLETE = "COMPLETE"
META = "meta.json"
CORRUPT = "E-CHECKPOINT-CORRUPT"
OTHER_FORMAT = "E-CHECKPOINT-VERSION"
FOLDER_NAME = re.compile(r"step-\d{8}")


def all_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders, complete or not, newest first."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if FOLDER_NAME.fullmatch(p.name)), reverse=True)


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint folders under `root`, newest first."""
    return [folder for folder in all_checkpoints(root) if (folder / COMPLETE).exists()]


def step_of(name: str) -> int:
    """The step that a checkpoint folder is named after."""
    return int(name.removeprefix("step-"))


def read_meta(folder: Path) -> dict[str, Any]:
    """The meta.json of a complete folder, which is what COMPLETE says.

    Raises TrainError `E-CHECKPOINT-CORRUPT` and `E-CHECKPOINT-VERSION`.
    """
    try:
        content, wanted = (folder / META).read_bytes(), (folder / COMPLETE).read_bytes()
    except OSError as error:
        raise corrupt(folder / META, f"cannot be read ({error})") from None
    return parse_meta(content, wanted, folder)


def parse_meta(content: bytes, wanted: bytes, folder: Path | str) -> dict[str, Any]:
    """What meta.json says, if `wanted`, the content of COMPLETE, is its sha256.

    Raises what `read_meta` does, with `folder` as the place.
    """
    place = f"{folder}/{META}"
    try:
        if hashlib.sha256(content).hexdigest().encode() != wanted:
            raise corrupt(place, "does not have the checksum in COMPLETE")
        meta: dict[str, Any] = json.loads(content)
        int(meta["step"])
        version = int(meta["schema_version"])
        if not isinstance(meta["files"], dict):
            raise ValueError("it lists no files")
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(place, f"cannot be read ({error})") from None
    if version != SCHEMA_VERSION:
        raise TrainError(
            OTHER_FORMAT,
            f"{folder} has format {version}, and this nmoe-train reads {SCHEMA_VERSION}",
            "use the version of nmoe-train that wrote it",
        )
    return meta


def verify(folder: Path) -> None:
    """Raises TrainError unless every file is what meta.json says, and that what COMPLETE says."""
    for name, entry in read_meta(folder)["files"].items():
        verify_file(folder / name, entry["sha256"])


def damages(folder: Path) -> list[str]:
    """What is wrong with each file of a complete folder. Raises `E-CHECKPOINT-VERSION`."""
    found: list[str] = []

    def noted(check: Callable[[], Result]) -> Result | None:
        try:
            return check()
        except TrainError as error:
            if error.code != CORRUPT:
                raise
            found.append(str(error))
            return None

    meta = noted(lambda: read_meta(folder))
    for name, entry in ({} if meta is None else meta["files"]).items():
        noted(functools.partial(verify_file, folder / name, entry["sha256"]))
    return found


def verify_file(file: Path, wanted: str) -> None:
    """Raises TrainError `E-CHECKPOINT-CORRUPT` unless a file has this sha256."""
    try:
        sound = sha256_file(file) == wanted
    except OSError as error:
        raise corrupt(file, f"cannot be read ({error.strerror})") from None
    if not sound:
        raise corrupt(file, "does not have the checksum in meta.json")


def corrupt(path: Path | str, what: str) -> TrainError:
    """The error of a checkpoint that is not what it says."""
    return TrainError(CORRUPT, f"{path} {what}", "a resume takes an older checkpoint that is sound")
