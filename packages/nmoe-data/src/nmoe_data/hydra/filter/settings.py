"""What a caller asks of a filter run, and what of it two starts of one run must share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe_data.errors import DataError
from nmoe_data.hydra.filter.asking import Asking
from nmoe_data.hydra.filter.decide import DROP, KEEP
from nmoe_data.hydra.filter.parts import PART_DOCUMENTS
from nmoe_data.hydra.filter.plan import CHUNK_BYTES
from nmoe_data.hydra.heads import Heads
from nmoe_data.sources import Source, SourceFile, listing_hash, source_list

DROPPED_SAMPLE = 1000


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """How to filter.

    workers: processes on CPUs. devices: instead, one process for each ("cuda:0"). ray: instead, so
    many `workers` as tasks of the Ray cluster of this address ("auto", "local" for one in this
    machine); the output folder must be the same on all its machines. text_field: the field of JSON
    records, or the column of Parquet files. band: "keep" or "drop", what becomes of documents that
    the heads cannot tell and the judge did not score. asking: the judge for the band, None for
    none. dropped_sample: lines of dropped.jsonl. seed: chooses them. dtype: of neural encoders.

    Raises DataError: E-ARGUMENT for values that do not work, E-HYDRA-DEVICE for unknown devices.
    """

    workers: int = 1
    devices: tuple[str, ...] = ()
    ray: str | None = None
    text_field: str = "text"
    band: str = KEEP
    asking: Asking | None = None
    dropped_sample: int = DROPPED_SAMPLE
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise DataError("E-ARGUMENT", f"workers is {self.workers}", "give at least 1")
        if self.band not in (KEEP, DROP):
            raise DataError("E-ARGUMENT", f"band is {self.band!r}", f"give {KEEP} or {DROP}")
        if self.dropped_sample < 0:
            raise DataError(
                "E-ARGUMENT", f"dropped-sample is {self.dropped_sample}", "give at least 0"
            )
        if self.ray is not None and self.devices:
            raise DataError("E-ARGUMENT", "devices and ray together", "give one of them")

    @property
    def places(self) -> list[str]:
        """The device of each worker process."""
        return list(self.devices) or ["cpu"] * self.workers


def shared_settings(
    settings: FilterSettings, source: Source, files: Sequence[SourceFile], heads: Heads
) -> dict[str, Any]:
    """Returns what two starts of one run must have in common, as filter.json holds it."""
    return {
        "sources": source_list(source),
        "source_files": listing_hash(files),
        "heads": heads.hash,
        "text_field": settings.text_field,
        "band": settings.band,
        "judge": None if settings.asking is None else settings.asking.to_json(),
        "dropped_sample": settings.dropped_sample,
        "seed": settings.seed,
        "dtype": settings.dtype,
        # Sums are rounded otherwise on another kind of device.
        "device": settings.places[0].partition(":")[0],
        "chunk_bytes": CHUNK_BYTES,
        "part_documents": PART_DOCUMENTS,
    }


def heads_summary(heads: Heads, folder: Path) -> dict[str, Any]:
    """Returns what filter.json says of the heads: enough to read scores and thresholds."""
    assert heads.calibration is not None
    return {
        "folder": folder.name,
        "hash": heads.hash,
        "encoder": heads.encoder_spec,
        "rubric": heads.rubric.name,
        "dimensions": list(heads.rubric.names),
        "has_judge": heads.has_judge,
        "calibration": heads.calibration.to_json(),
    }
