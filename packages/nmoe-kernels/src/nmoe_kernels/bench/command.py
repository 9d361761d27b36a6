"""What `nmoe-kernels bench` does: reads its options, prints a table as it goes, writes the JSON."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from nmoe_kernels.bench.moe import (
    DEFAULT_SHAPES,
    ROUTINGS,
    TOLERANCE,
    Measurement,
    Shape,
    measure_moe,
)
from nmoe_kernels.errors import KernelError
from nmoe_kernels.hardware import BACKENDS, describe, dtype_name


def run_moe(
    device: str,
    shapes: Sequence[str] | None,
    routings: str,
    dtype: str,
    backends: str | None,
    repeats: int,
    json_file: Path | None,
) -> None:
    """Measures every shape and routing. Raises KernelError E-BENCH for options that cannot be."""
    if device not in DEFAULT_SHAPES or (device == "cuda" and not torch.cuda.is_available()):
        raise KernelError("E-BENCH", f"there is no device {device!r} here", "give --device cpu")
    types = {dtype_name(known): known for known in TOLERANCE}
    _known("dtype", [dtype], types)
    _known("routing", routings.split(","), ROUTINGS)
    chosen = backends.split(",") if backends else list(BACKENDS)
    _known("backend", chosen, BACKENDS)
    console, rows = Console(soft_wrap=True), list[Measurement]()
    console.print(f"{_hardware()['device']}, {dtype}, router included, medians of {repeats}")
    for shape in _shapes(shapes) or DEFAULT_SHAPES[device]:
        for routing in routings.split(","):
            console.print(f"T,H,I,E,K = {shape}, {routing}", highlight=False)
            for found in measure_moe(
                shape, routing, types[dtype], torch.device(device), chosen, repeats
            ):
                rows.append(found)
                console.print(_line(found), highlight=False)
    if json_file is not None:
        report = {"hardware": _hardware(), "repeats": repeats, "rows": [asdict(r) for r in rows]}
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def _line(found: Measurement) -> str:
    if found.forward_ms is None or found.both_ms is None:
        return f"  {found.backend:10s} {found.note}"
    peak = "" if found.peak_gib is None else f"  peak {found.peak_gib:.1f} GiB"
    return (
        f"  {found.backend:10s} forward {found.forward_ms:8.2f} ms {found.forward_tflops:6.1f} "
        f"TFLOP/s  both {found.both_ms:8.2f} ms {found.both_tflops:6.1f} TFLOP/s{peak}  "
        f"error {found.error:.1e}"
    )


def _shapes(texts: Sequence[str] | None) -> list[Shape]:
    try:
        return [Shape.parse(text) for text in texts or ()]
    except (ValueError, TypeError):
        what = f"a shape of {', '.join(texts or ())} is not five numbers"
        raise KernelError("E-BENCH", what, "write T,H,I,E,K as in 8192,2048,1024,64,8") from None


def _known(what: str, given: Sequence[str], known: Sequence[str] | dict[str, torch.dtype]) -> None:
    for word in given:
        if word not in known:
            message = f"there is no {what} {word!r}"
            raise KernelError("E-BENCH", message, f"choose from {', '.join(known)}")


def _hardware() -> dict[str, str]:
    machine = describe()
    name = machine.gpus[0].name if machine.gpus else f"cpu, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "torch": machine.torch,
        "triton": machine.triton,
        "cuda": machine.cuda_runtime,
        "driver": machine.cuda_driver,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
