"""What a filter run tells its caller, and the names of what it makes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUMMARY_NAME = "filter.json"
TIMING_NAME = "timing.json"
KEPT_NAME, SCORES_NAME, WORK_NAME = "kept", "scores", "work"
DROPPED_NAME = "dropped.jsonl"


@dataclass(frozen=True, slots=True)
class FilterProgress:
    """How far a run is; bytes are of source files on disk.

    documents, kept, rejected: so far, those of earlier starts included. asked: documents that were
    put to the judge. documents_per_s: since this start.
    """

    bytes_done: int
    bytes_total: int
    documents: int
    kept: int
    rejected: int
    asked: int
    documents_per_s: float


@dataclass(frozen=True, slots=True)
class FilterResult:
    """What a finished run made. summary: filter.json; reused: it had been finished before."""

    out: Path
    summary: dict[str, Any]
    reused: bool


Progress = Callable[[FilterProgress], None]
