"""Which objects below a URL are copied into a mirror, and under which path.

Only names that the store reads are taken: `run.json`, events, metrics, GPU readings, manifests,
what the judge pipeline wrote, and of a checkpoint `meta.json` and `COMPLETE`. Its other files are
tensors that nviz measures and never opens: of these only the size is taken. Names come from whoever
may write there, so a path has a few plain parts, or it is passed over.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from nviz.store import checkpoints, files, gpus, hydra, manifests
from nviz.store.folders import DEPTH
from nviz.store.parse import number

# Below a run, three levels down at most: `checkpoints/step-00001000/meta.json`.
MOST_PARTS = DEPTH + 3
MOST_PART_BYTES = 200
PART = re.compile(r"[^./\\:\x00-\x1f\x7f][^/\\:\x00-\x1f\x7f]*")
PLAIN_NAMES = frozenset(
    {
        "run.json",
        "events.jsonl",
        manifests.MANIFEST,
        "tokenizer.json",
        "labels.parquet",
        "dropped.jsonl",
        *hydra.KINDS.values(),
    }
)
CHECKPOINT_NAMES = frozenset({"meta.json", "COMPLETE"})
MODIFIED_KEYS = ("LastModified", "last_modified", "mtime", "updated", "created")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object to mirror: its path below the URL, its full name there, and what tells a new one.

    `measured` ones give only their size. `modified_unix_s` is None where the storage does not say.
    """

    path: str
    source: str
    size: int
    modified_unix_s: float | None
    version: str
    measured: bool

    @property
    def order(self) -> int:
        """Place among the copies: a list needs run.json, and a live file is emptied after its rows
        were sealed, so that copying it before the part would lose rows from sight."""
        name = PurePosixPath(self.path).name
        if name == "run.json":
            return 0
        return 1 if name.endswith(".parquet") else 2


def remote_file(source: str, base: str, info: dict[str, Any]) -> RemoteFile | None:
    """The file to mirror for an entry of a listing below `base`, None if it is passed over."""
    inside = f"{base.rstrip('/')}/"
    if not source.startswith(inside) or info.get("type") != "file":
        return None
    path = source.removeprefix(inside)
    size = info.get("size")
    if not _is_safe(path) or not isinstance(size, int):
        return None
    taken, measured = _kind(path.split("/"))
    if not taken:
        return None
    modified = _modified_unix_s(info)
    tag = info.get("ETag") or info.get("etag") or ""
    return RemoteFile(path, source, size, modified, f"{tag} {size} {modified}", measured)


def _is_safe(path: str) -> bool:
    parts = path.split("/")
    if len(parts) > MOST_PARTS or not all(PART.fullmatch(part) for part in parts):
        return False
    try:
        return all(len(part.encode()) <= MOST_PART_BYTES for part in parts)
    except UnicodeEncodeError:
        return False


def _kind(parts: list[str]) -> tuple[bool, bool]:
    """Whether a file is taken, and whether only its size is."""
    folder, name = parts[-2] if len(parts) > 1 else "", parts[-1]
    if len(parts) > 2 and parts[-3] == "checkpoints" and checkpoints.NAME.fullmatch(folder):
        return True, name not in CHECKPOINT_NAMES
    if folder == "metrics":
        return files.NAME.fullmatch(name) is not None, False
    if folder == "scores" and name.endswith(".parquet"):
        return True, False
    return name in PLAIN_NAMES or gpus.NAME.fullmatch(name) is not None, False


def _modified_unix_s(info: dict[str, Any]) -> float | None:
    """When an object was written; storages name and type this differently."""
    value = next((info[key] for key in MODIFIED_KEYS if info.get(key) is not None), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    return value.timestamp() if isinstance(value, datetime) else number(value)
