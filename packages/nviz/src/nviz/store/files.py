"""Names of the files in a run's metrics folder, and what they say: attempt, rank, part, kind."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from nviz.store.runs import Signature

NAME = re.compile(
    r"(?P<attempt>\d{1,9})-(?P<rank>\d{1,9})(-(?P<part>\d{1,9}))?(?P<experts>-experts)?"
    r"\.(?P<kind>jsonl|parquet)"
)


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """One file of a metrics folder. `sealed` files are Parquet and no longer change."""

    path: Path
    attempt: int
    rank: int
    experts: bool
    sealed: bool
    signature: Signature


def list_metrics_files(folder: Path) -> list[MetricsFile]:
    """The metrics files of the run in `folder`, sorted by name; empty if there are none yet.

    Links are passed over: they could lead out of the runs' root.
    """
    found = []
    inside = folder / "metrics"
    if inside.is_symlink():
        return []
    try:
        with os.scandir(inside) as entries:
            for entry in entries:
                file = _metrics_file(entry)
                if file:
                    found.append(file)
    except OSError:
        return []
    return sorted(found, key=lambda file: file.path.name)


def _metrics_file(entry: os.DirEntry[str]) -> MetricsFile | None:
    match = NAME.fullmatch(entry.name)
    if not match or not entry.is_file(follow_symlinks=False):
        return None
    try:
        found = entry.stat()
    except OSError:
        return None
    return MetricsFile(
        path=Path(entry.path),
        attempt=int(match["attempt"]),
        rank=int(match["rank"]),
        experts=match["experts"] is not None,
        sealed=match["kind"] == "parquet",
        signature=(found.st_mtime_ns, found.st_size, found.st_ino),
    )
