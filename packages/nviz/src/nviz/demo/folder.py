"""Writes one run's folder as nmoe-train leaves it: run.json, events, metrics, checkpoints, GPUs.

A part of `seal_every` rows is sealed to Parquet; what an attempt did not seal before it ended stays
in the live JSONL file, and a run that died in a write leaves a torn line behind.
"""

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nviz.demo import signals
from nviz.demo.plan import KEPT_CHECKPOINTS, Attempt, RunPlan, config_of, layout_of

COMMIT_MS = 41.5
NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
TORN = '{"step":'


def write_run(folder: Path, plan: RunPlan, data: dict[str, Any]) -> None:
    """Writes all files of `plan` into the new `folder`; run.json says `data` of its data."""
    (folder / "metrics").mkdir(parents=True)
    events: list[dict[str, Any]] = []
    for attempt in plan.attempts:
        events += _write_attempt(folder, plan, attempt)
    samples = signals.gpu_samples(plan)
    if samples is not None:
        pq.write_table(pa.table(samples), folder / "gpu.parquet", compression="zstd")
    _write_checkpoints(folder / "checkpoints", plan)
    lines = [json.dumps(event) + "\n" for event in sorted(events, key=_time)]
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "run.json").write_text(json.dumps(_record(plan, data), indent=1))


def _time(event: dict[str, Any]) -> float:
    return float(event["time_unix_s"])


def _write_attempt(folder: Path, plan: RunPlan, attempt: Attempt) -> list[dict[str, Any]]:
    """The attempt's metrics and expert loads; returns its events."""
    if attempt.last < attempt.first:
        started = {"time_unix_s": attempt.started_unix_s, "event": "start", "step": 0}
        return [started]
    for rank in range(attempt.ranks):
        table = _metrics_table(plan, attempt, rank)
        _write_stream(folder / "metrics", plan, attempt, rank, table)
        if rank == 0:
            leading = table
    _write_experts(folder / "metrics", plan, attempt)
    steps = leading["step"].to_numpy()
    return _events(plan, attempt, steps, leading["time_unix_s"].to_numpy(), leading)


def _metrics_table(plan: RunPlan, attempt: Attempt, rank: int) -> pa.Table:
    columns = {
        name: pa.array(values) for name, values in signals.scalars(plan, attempt, rank).items()
    }
    steps = columns["step"].to_numpy()
    # The record of the step after a save tells what the save cost.
    saved = ((steps - 1) % plan.checkpoint_every == 0) & (steps > attempt.first)
    cost = pa.array(np.full(len(steps), COMMIT_MS), mask=~saved)
    columns |= {"checkpoint/stall_ms": cost, "checkpoint/commit_ms": cost}
    evaluated = _evaluated(plan, steps)
    losses = signals.rounded(signals.cross_entropy(plan, steps.astype(np.float64)) + 0.02)
    columns["loss/validation"] = pa.array(losses, mask=~evaluated)
    return pa.table(columns)


def _evaluated(plan: RunPlan, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (steps % plan.eval_every == 0) | (steps == plan.steps)


def _write_stream(
    folder: Path, plan: RunPlan, attempt: Attempt, rank: int, table: pa.Table
) -> None:
    rows, every = table.num_rows, plan.seal_every
    sealed = rows if attempt.sealed else rows // every * every
    for part, first in enumerate(range(0, sealed, every)):
        piece = table.slice(first, min(every, sealed - first))
        path = folder / f"{attempt.number}-{rank}-{part:03d}.parquet"
        pq.write_table(piece, path, compression="zstd")
    live = [_line(row) for row in table.slice(sealed).to_pylist()]
    if plan.fate == "silent":
        live.append(TORN)
    (folder / f"{attempt.number}-{rank}.jsonl").write_text("".join(live))


def _line(row: dict[str, Any]) -> str:
    kept = {
        name: NON_FINITE[repr(value)]
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in row.items()
        if value is not None
    }
    return json.dumps(kept, separators=(",", ":")) + "\n"


def _write_experts(folder: Path, plan: RunPlan, attempt: Attempt) -> None:
    steps = np.arange(attempt.first, attempt.last + 1)
    steps = steps[steps % plan.expert_every == 0]
    sealed = attempt.sealed or len(steps) > plan.seal_every
    for part, first in enumerate(range(0, len(steps), plan.seal_every)):
        chosen = steps[first : first + plan.seal_every]
        table = _experts_table(plan, chosen, part, attempt)
        if sealed:
            path = folder / f"{attempt.number}-0-{part:03d}-experts.parquet"
            pq.write_table(table, path, compression="zstd")
        else:
            lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in table.to_pylist()]
            (folder / f"{attempt.number}-0-experts.jsonl").write_text("".join(lines))


def _experts_table(
    plan: RunPlan, steps: NDArray[np.int64], part: int, attempt: Attempt
) -> pa.Table:
    load_SLE, bias_SLE = signals.expert_loads(plan, steps, part, attempt)
    numbers = np.arange(plan.shape.dense_layers, plan.shape.layers)
    layers = _nested(np.broadcast_to(numbers, (len(steps), len(numbers))))
    return pa.table(
        {"step": steps, "layers": layers, "load": _nested(load_SLE), "bias": _nested(bias_SLE)}
    )


def _nested(values: NDArray[Any]) -> pa.Array:
    """An array as lists of lists, one level for each axis but the first."""
    found = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        rows = math.prod(values.shape[:axis])
        found = pa.ListArray.from_arrays(np.arange(rows + 1) * values.shape[axis], found)
    return found


def _events(
    plan: RunPlan,
    attempt: Attempt,
    steps: NDArray[np.int64],
    times: NDArray[np.float64],
    table: pa.Table,
) -> list[dict[str, Any]]:
    def at(step: int, event: str, **more: Any) -> dict[str, Any]:
        when = float(times[min(max(step - attempt.first, 0), len(times) - 1)])
        return {"time_unix_s": when, "event": event, "step": step} | more

    found = _beginning(plan, attempt)
    for step in steps[steps % plan.checkpoint_every == 0].tolist():
        found.append(at(step, "checkpoint", commit_ms=COMMIT_MS))
    losses = table["loss/validation"].to_pylist()
    evaluated = np.flatnonzero(_evaluated(plan, steps)).tolist()
    found += [at(int(steps[i]), "eval", **{"loss/validation": losses[i]}) for i in evaluated]
    norms = table["grad_norm"].to_numpy()
    for i in np.flatnonzero(~np.isfinite(norms)).tolist():
        found.append(at(int(steps[i]), "fault", what="gradient not finite, update skipped"))
    if attempt is plan.attempts[-1]:
        found += _ending(plan, at)
    elif plan.fate == "recovered":
        lost = attempt.ranks - 1
        what = f"rank {lost} on node-00 did not answer for 30 s"
        found.append(at(attempt.last, "fault", what=what, rank=lost, host="node-00"))
    return found


def _beginning(plan: RunPlan, attempt: Attempt) -> list[dict[str, Any]]:
    """The attempt's first event, and what its recovery cost."""
    begun = attempt.first - 1
    event = {
        "time_unix_s": attempt.started_unix_s,
        "event": "start" if attempt.number == 1 else "resume",
        "step": begun,
    }
    if attempt.died_at is None or plan.fate != "recovered":
        return [event]
    recovery = {
        "time_unix_s": attempt.started_unix_s + 1.0,
        "event": "recovery",
        "step": begun,
        "seconds": 45.0,
        "steps_lost": attempt.died_at - begun,
        "ranks": attempt.ranks,
    }
    return [event, recovery]


def _ending(plan: RunPlan, at: Any) -> list[dict[str, Any]]:
    if plan.status == "running":
        return []
    found = []
    if plan.status == "failed":
        what = "E-NOT-FINITE: the gradient was not finite in 10 steps in a row"
        found.append(at(plan.last_step, "fault", what=what))
    return [*found, at(plan.last_step, "end", status=plan.status)]


def _write_checkpoints(folder: Path, plan: RunPlan) -> None:
    """The newest complete checkpoints; a run that died in a save has an unfinished one too."""
    every, last = plan.checkpoint_every, plan.last_step
    done = list(range(every, last + 1, every))
    if plan.status in ("completed", "interrupted") and last and (not done or done[-1] != last):
        done.append(last)
    for step in done[-KEPT_CHECKPOINTS:]:
        _write_checkpoint(folder / f"step-{step:08d}", plan, step, complete=True)
    if plan.fate == "silent" and last:
        _write_checkpoint(folder / f"step-{last + 1:08d}", plan, last + 1, complete=False)


def _write_checkpoint(folder: Path, plan: RunPlan, step: int, complete: bool) -> None:
    """One file a rank; the tensors have their names and types, and the shapes of a tiny model."""
    folder.mkdir(parents=True)
    shapes = {"embedding.weight": [257, 8], "layers.0.attention.output.weight": [8, 8]}
    for expert in range(min(plan.shape.experts, 16)):
        shapes[f"layers.{plan.shape.dense_layers}.moe.experts.{expert}.down"] = [8, 4]
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for rank in range(plan.attempts[-1].ranks):
        file = f"rank-{rank:05d}.safetensors"
        own = dict(list(shapes.items())[rank :: plan.attempts[-1].ranks])
        content = _safetensors(own)
        (folder / file).write_bytes(content)
        files[file] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        tensors |= {n: {"file": file, "shape": s, "dtype": "float32"} for n, s in own.items()}
    if not complete:
        return
    meta = {
        "schema_version": 1,
        "step": step,
        "tokens": step * plan.shape.tokens_per_step,
        "updates": step,
        "steps": plan.steps,
        "fingerprint": _fingerprint(plan),
        "fields": {"run.seed": plan.model_seed, "optimizer.lr": plan.lr},
        "layout": layout_of(plan),
        "loader": {"step": step, "seed": plan.model_seed},
        "randomness": {"seed": plan.model_seed},
        "files": files,
        "tensors": tensors,
    }
    content = json.dumps(meta, indent=1).encode()
    (folder / "meta.json").write_bytes(content)
    (folder / "COMPLETE").write_text(hashlib.sha256(content).hexdigest())


def _safetensors(shapes: dict[str, list[int]]) -> bytes:
    """Zeros of these shapes as a safetensors file: header length, JSON header, bytes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(end)


def _fingerprint(plan: RunPlan) -> str:
    """Equal for runs whose settings that change results are equal."""
    config = config_of(plan)
    fields = {name: config[name] for name in ("model", "train", "optimizer", "schedule")}
    fields["seed"] = plan.model_seed
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _record(plan: RunPlan, data: dict[str, Any]) -> dict[str, Any]:
    shape, newest = plan.shape, plan.attempts[-1]
    results: dict[str, float] = {}
    if plan.status == "completed":
        loss = signals.cross_entropy(plan, np.array([float(plan.last_step)])) + 0.02
        results = {"loss/validation": float(signals.rounded(loss)[0]), "loss/unigram": 7.4}
    return {
        "schema_version": 1,
        "run_id": plan.run_id,
        "attempt": newest.number,
        "attempts": [
            {
                "attempt": attempt.number,
                "started_unix_s": attempt.started_unix_s,
                "from_step": attempt.first - 1,
            }
            for attempt in plan.attempts
        ],
        "started_unix_s": plan.attempts[0].started_unix_s,
        "results": results,
        "status": plan.status,
        "step": plan.last_step,
        "ended_unix_s": plan.ended_unix_s,
        "git_revision": "0" * 40,
        "versions": {"python": "3.11.7", "torch": "2.15.0", "nmoe-train": "0.1.0"},
        "hosts": [f"node-{n:02d}" for n in range((shape.ranks + 7) // 8)],
        "pid": 4242,
        "name": plan.name,
        "tags": list(plan.tags),
        "group": plan.group,
        "steps": plan.steps,
        "config": config_of(plan),
        "fingerprint": _fingerprint(plan),
        "layout": layout_of(plan),
        "device": shape.device if shape.on_gpu else "cpu (2 threads)",
        "backend": "triton" if shape.on_gpu else "torch",
        "parameters": shape.parameters,
        "data": data,
        "updated_unix_s": plan.updated_unix_s,
    }
