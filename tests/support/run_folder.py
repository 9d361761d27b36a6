"""Writes run folders as a trainer does: run.json by rename, whole JSONL lines, sealed Parquet."""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START = 1_790_000_000.0
WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def plain(value: Any) -> Any:
    """`value` as the trainer's JSON has it: non-finite numbers are words."""
    if isinstance(value, float) and not math.isfinite(value):
        return WORDS[repr(value)]
    return value


def record(step: int, loss: float | None = None, **more: float) -> dict[str, Any]:
    """A plausible record of `step`; `more` replaces or adds keys (None leaves one out)."""
    wave = math.sin(step * 12.9898) * 0.05
    values = {
        "step": step,
        "time_unix_s": START + 0.5 * step,
        "tokens": 4096 * (step + 1),
        "loss/train": 2.0 + 3.5 * math.exp(-step / 120) + wave if loss is None else loss,
        "loss/ce": 2.0 + 3.5 * math.exp(-step / 120),
        "loss/z": 0.002,
        "loss/balance": 0.01 + 0.02 * math.exp(-step / 60),
        "grad_norm": 0.8 + abs(wave) * 6,
        "lr/dense": 3e-4 * min(1.0, (step + 1) / 40),
        "lr/router": 1e-4 * min(1.0, (step + 1) / 40),
        "lr/expert": 2e-4 * min(1.0, (step + 1) / 40),
        "tokens_per_s": 8000.0 + 900 * wave / 0.05,
        "mfu": 0.31,
        "step_ms": 510.0 + 200 * abs(wave),
        "time_ms/data": 4.0,
        "time_ms/forward": 150.0,
        "time_ms/backward": 300.0 + 200 * abs(wave),
        "time_ms/optimizer": 56.0,
        "router/load_imbalance": 1.2 + 1.5 * math.exp(-step / 50),
        "router/entropy": 1.9 - 0.4 * math.exp(-step / 50),
        "router/bias_range": 0.02 * min(1.0, step / 100),
        "router/dropped": 0,
        "memory/allocated_gib": 1.1,
        "memory/reserved_gib": 1.4,
        "memory/peak_gib": 1.3,
        "active_ranks": 1,
    }
    values |= {name.replace("__", "/"): value for name, value in more.items()}
    return {name: plain(value) for name, value in values.items() if value is not None}


def expert_record(
    step: int, layers: int = 4, experts: int = 16, dead: bool = True
) -> dict[str, Any]:
    """Tokens of each expert; with `dead`, expert 5 of the second layer gets none after step 100."""
    drawn = np.random.default_rng([7, step])
    skew = np.linspace(1.8 - min(step, 150) / 200, 0.4 + min(step, 150) / 300, experts)
    load = drawn.multinomial(4096, skew / skew.sum(), size=layers)
    if dead and step > 100 and layers > 1:
        load[1, 5 % experts] = 0
    return {
        "step": step,
        "layers": list(range(1, layers + 1)),
        "load": load.tolist(),
        "bias": np.zeros((layers, experts)).tolist(),
    }


class RunFolder:
    """A run folder under construction."""

    def __init__(self, root: Path, run_id: str, **fields: Any) -> None:
        self.path = root / run_id
        (self.path / "metrics").mkdir(parents=True)
        self.fields = self._defaults(run_id) | fields
        self.save()

    @staticmethod
    def _defaults(run_id: str) -> dict[str, Any]:
        now = time.time()
        return {
            "schema_version": 1,
            "run_id": run_id,
            "name": run_id,
            "tags": [],
            "group": None,
            "status": "running",
            "started_unix_s": now - 600,
            "updated_unix_s": now,
            "ended_unix_s": None,
            "attempt": 1,
            "attempts": [{"attempt": 1, "started_unix_s": now - 600, "from_step": 0}],
            "step": 0,
            "steps": 500,
            "config": {
                "model": {"layers": 6, "experts": 16, "experts_per_token": 2, "width": 256},
                "optimizer": {"lr": {"dense": 3e-4, "router": 1e-4}, "betas": [0.9, 0.95]},
                "data": {"path": "shards", "sequence_length": 512},
                "seed": 17,
            },
            "fingerprint": "5f1d9c0a7be34412",
            "git_revision": "0f3a9b1",
            "versions": {"nmoe-train": "0.1.0", "torch": "2.15.0", "python": "3.12.3"},
            "layout": {"dp": 1, "tp": 1, "pp": 1, "ep": 1},
            "hosts": ["node-a"],
            "device": "cpu",
            "pid": 4242,
            "results": {},
        }

    def save(self, **fields: Any) -> None:
        """Write run.json by rename, with `fields` changed."""
        self.fields |= fields
        partial = self.path / "run.json.partial"
        partial.write_text(json.dumps(self.fields))
        partial.replace(self.path / "run.json")

    def append(self, *records: dict[str, Any], attempt: int = 1, rank: int = 0) -> None:
        """Add whole lines to the live metrics."""
        self._append(f"{attempt}-{rank}.jsonl", records)

    def append_experts(self, *records: dict[str, Any], attempt: int = 1, rank: int = 0) -> None:
        """Add whole lines to the live expert loads."""
        self._append(f"{attempt}-{rank}-experts.jsonl", records)

    def _append(self, name: str, records: tuple[dict[str, Any], ...]) -> None:
        with (self.path / "metrics" / name).open("a") as file:
            file.writelines(json.dumps(item) + "\n" for item in records)

    def tear(self, text: str = '{"step": 99', attempt: int = 1, rank: int = 0) -> None:
        """Leave a line without its end."""
        with (self.path / "metrics" / f"{attempt}-{rank}.jsonl").open("a") as file:
            file.write(text)

    def seal(
        self, *records: dict[str, Any], attempt: int = 1, rank: int = 0, part: int = 0
    ) -> None:
        """Write a sealed part of these rows; the words for non-finite values become numbers."""
        numbers = {word: float(key) for key, word in WORDS.items()}
        rows = [
            {k: numbers.get(v, v) if isinstance(v, str) else v for k, v in item.items()}
            for item in records
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        self._seal(table, f"{attempt}-{rank}-{part:03d}.parquet")

    def seal_experts(
        self, *records: dict[str, Any], attempt: int = 1, rank: int = 0, part: int = 0
    ) -> None:
        """Write a sealed part of expert loads."""
        self._seal(
            pa.Table.from_pylist(list(records)), f"{attempt}-{rank}-{part:03d}-experts.parquet"
        )

    def _seal(self, table: pa.Table, name: str) -> None:
        target = self.path / "metrics" / name
        pq.write_table(table, target.with_suffix(".partial"))
        target.with_suffix(".partial").replace(target)

    def event(self, event: str, step: int, **more: Any) -> None:
        """Add an event."""
        with (self.path / "events.jsonl").open("a") as file:
            item = {"time_unix_s": START + 0.5 * step, "event": event, "step": step} | more
            file.write(json.dumps(item) + "\n")


def trained(root: Path, run_id: str, steps: int = 200, **fields: Any) -> RunFolder:
    """A whole run: half of it sealed, half live, experts, evaluations, events."""
    run = RunFolder(root, run_id, steps=steps, step=steps - 1, **fields)
    rows = [
        record(step, loss__validation=2.1 + 3.4 * math.exp(-step / 120))
        if step % 50 == 49
        else record(step)
        for step in range(steps)
    ]
    loads = [expert_record(step) for step in range(steps)]
    half = steps // 2
    run.seal(*rows[:half])
    run.seal_experts(*loads[:half])
    run.append(*rows[half:])
    run.append_experts(*loads[half:])
    run.event("start", 0)
    run.event("checkpoint", half, commit_ms=41.5)
    return run
