"""Files of a run folder beside its metrics: GPU readings, checkpoints, as a trainer writes them."""

import hashlib
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from run_folder import START, RunFolder


def write_gpus(run: RunFolder, readings: dict[int, list[float]], **more: Any) -> None:
    """Write gpu.parquet: utilisation by rank, a reading every ten seconds; `more` are constant
    columns (None leaves one out)."""
    rows = [
        {
            "time_unix_s": START + 10.0 * at,
            "rank": rank,
            "host": "node-00",
            "utilisation_percent": value,
            "memory_used_gib": 100.0,
            "memory_total_gib": 140.0,
            "power_w": 600.0 + rank,
            "power_limit_w": 700.0,
            "temperature_c": 60.0 + rank,
            "clock_sm_mhz": 1830.0,
            "clock_memory_mhz": 3201.0,
        }
        | more
        for rank, values in readings.items()
        for at, value in enumerate(values)
    ]
    kept = [{name: value for name, value in row.items() if value is not None} for row in rows]
    pq.write_table(pa.Table.from_pylist(kept), run.path / "gpu.parquet")


def write_checkpoint(
    run: RunFolder, step: int, *, ranks: int = 2, complete: bool = True, **more: Any
) -> None:
    """Write a checkpoint folder of a tiny model, its experts spread over the ranks."""
    folder = run.path / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {
        "model.embedding.weight": {"file": name_of(0), "shape": [256, 8], "dtype": "float32"},
        "model.layers.1.moe.experts.router.bias": {
            "file": name_of(0),
            "shape": [4],
            "dtype": "float32",
        },
    }
    for expert in range(4):
        for prefix in ("model", "optimizer.exp_avg"):
            tensors[f"{prefix}.layers.1.moe.experts.{expert}.down"] = {
                "file": name_of(expert % ranks),
                "shape": [8, 16],
                "dtype": "float32",
            }
    for rank in range(ranks):
        content = bytes([rank]) * (1000 + rank)
        (folder / name_of(rank)).write_bytes(content)
        files[name_of(rank)] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
        }
    meta = {
        "schema_version": 1,
        "step": step,
        "tokens": 4096 * step,
        "fingerprint": run.fields["fingerprint"],
        "layout": {"dp": ranks, "tp": 1, "pp": 1, "ep": ranks},
        "files": files,
        "tensors": tensors,
    } | more
    content = json.dumps(meta, indent=1).encode()
    (folder / "meta.json").write_bytes(content)
    if complete:
        (folder / "COMPLETE").write_text(hashlib.sha256(content).hexdigest())


def name_of(rank: int) -> str:
    """The file of a writing rank."""
    return f"rank-{rank:05d}.safetensors"
