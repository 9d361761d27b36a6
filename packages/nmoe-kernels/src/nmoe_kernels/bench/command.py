"""What `nmoe-kernels bench` does: reads its options, prints as it measures, writes the figures."""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from rich.console import Console

from nmoe_kernels.bench import gemm, output, router
from nmoe_kernels.bench.ceilings import measure_ceilings
from nmoe_kernels.bench.first_call import first_calls
from nmoe_kernels.bench.inputs import ROUTINGS
from nmoe_kernels.bench.measure import TOLERANCE, Measurement
from nmoe_kernels.bench.moe import measure_moe
from nmoe_kernels.bench.peers import PEERS
from nmoe_kernels.bench.published import published_rows
from nmoe_kernels.bench.shapes import LAYERS, ROUTERS, RouterShape, Shape, parse_shapes
from nmoe_kernels.errors import KernelError
from nmoe_kernels.hardware import BACKENDS, CUTE_RELEASES, describe, dtype_name, installed


@dataclass(frozen=True)
class Options:
    """What all benchmarks are told; None and empty stand for their defaults."""

    device: str
    shapes: Sequence[str] | None
    routings: str
    dtype: str
    repeats: int
    json_file: Path | None = None
    csv_file: Path | None = None
    chart_file: Path | None = None


def run_moe(options: Options, backends: str | None, peers: str, first_call: bool) -> None:
    """Measures the layer. peers: names, "all" or "none". Raises KernelError E-BENCH."""
    ours = chosen("backend", "all" if backends is None else backends, BACKENDS)
    others = chosen("peer", peers, PEERS)
    shapes = parse_shapes(options.shapes, Shape, LAYERS, options.device)
    measure = partial(measure_moe, backends=ours, peers=others)
    _run("moe", options, shapes, measure, first_call=first_call)


def run_gemm(options: Options, contenders: str) -> None:
    """Measures the products. Raises KernelError E-BENCH."""
    names = chosen("contender", contenders, gemm.CONTENDERS)
    shapes = parse_shapes(options.shapes, Shape, LAYERS, options.device)
    _run("gemm", options, shapes, partial(gemm.measure_gemm, contenders=names))


def run_router(options: Options, contenders: str, score: str, first_call: bool) -> None:
    """Measures the router. score: softmax or sigmoid. Raises KernelError E-BENCH."""
    names = chosen("contender", contenders, router.CONTENDERS)
    chosen("score", score, get_args(router.Score))
    shapes = parse_shapes(options.shapes, RouterShape, ROUTERS, options.device)
    kind = cast(router.Score, score)
    measure = partial(router.measure_router, contenders=names, score=kind)
    more = {"score": score, "published": published_rows()}
    _run("router", options, shapes, measure, more, first_call=first_call)


def chosen(what: str, given: str, known: Iterable[str]) -> list[str]:
    """Names with commas, "all" or "none", as a list without repeats. Raises KernelError E-BENCH."""
    known = list(known)
    if given in ("all", "none"):
        return known if given == "all" else []
    names = list(dict.fromkeys(given.split(",")))
    for name in names:
        if name not in known:
            message = f"there is no {what} {name!r}"
            raise KernelError("E-BENCH", message, f"choose from {', '.join(known)}")
    return names


def _run(
    kind: str,
    options: Options,
    shapes: Sequence[Shape] | Sequence[RouterShape],
    measure: Callable[..., list[Measurement]],
    more: Mapping[str, Any] | None = None,
    *,
    first_call: bool = False,
) -> None:
    device, dtype = _checked(options)
    routings = chosen("routing", options.routings, ROUTINGS)
    output.check_targets(options.json_file, options.csv_file, options.chart_file)
    console, rows = Console(soft_wrap=True, highlight=False, markup=False), list[Measurement]()
    report = {
        "bench": kind,
        "hardware": hardware(options.device),
        "repeats": options.repeats,
        "ceilings": measure_ceilings(dtype, device, options.repeats),
        **(more or {}),
    }
    console.print(_heading(report, options.dtype))
    for shape in shapes:
        for routing in routings:
            console.print(f"{shape}, {routing}")
            found = measure(shape, routing, dtype, device, repeats=options.repeats)
            for measurement in found:
                # It takes minutes, and compiling does not depend on the routing.
                wanted = first_call and routing == routings[0]
                if wanted and measurement.times and measurement.error is not None:
                    _add_first_calls(kind, measurement, options.device)
                console.print(output.line(measurement))
            rows += found
            _write(kind, options, report, rows)


def _add_first_calls(kind: str, found: Measurement, device: str) -> None:
    if device == "cuda":
        # The other process needs the memory that this one keeps for later.
        torch.cuda.empty_cache()
    names = (found.shape, found.routing, found.dtype, device, found.contender)
    answer = first_calls(kind, *names)
    if isinstance(answer, str):
        found.note = "; ".join(filter(None, (found.note, answer)))
    else:
        found.first_call_cold_s, found.first_call_warm_s = answer


def _write(
    kind: str, options: Options, report: Mapping[str, Any], rows: Sequence[Measurement]
) -> None:
    """Writes what is known after each shape, so that a run that is cut short leaves it."""
    if options.json_file is not None:
        output.write(options.json_file, output.as_json(report, rows))
    if options.csv_file is not None:
        output.write(options.csv_file, output.as_csv(rows))
    if options.chart_file is not None:
        title = f"{kind} on {report['hardware']['device']}, {options.dtype}"
        output.write(options.chart_file, output.as_chart(title, rows))


def _heading(report: Mapping[str, Any], dtype: str) -> str:
    ceilings = report["ceilings"]
    return (
        f"{report['hardware']['device']}, {dtype}, medians of {report['repeats']} (quartiles); "
        f"dense {ceilings['dense_size']}^3 {ceilings['dense_tflops']:.3g} TFLOP/s, "
        f"copy {ceilings['copy_gbps']:.0f} GB/s"
    )


def _checked(options: Options) -> tuple[torch.device, torch.dtype]:
    known = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    if options.device not in known:
        what = f"there is no device {options.device!r} here"
        raise KernelError("E-BENCH", what, f"give --device {known[0]}")
    types = {dtype_name(dtype): dtype for dtype in TOLERANCE}
    if options.dtype not in types:
        what = f"there is no dtype {options.dtype!r}"
        raise KernelError("E-BENCH", what, f"choose from {', '.join(types)}")
    return torch.device(options.device), types[options.dtype]


def hardware(device: str) -> dict[str, str]:
    """The device and the versions that a report names."""
    machine, cpu = describe(), f"cpu, {torch.get_num_threads()} threads"
    name = machine.gpus[0].name if device == "cuda" else cpu
    return {
        "device": name,
        "torch": machine.torch,
        "triton": machine.triton,
        **{package: installed(package) for package in CUTE_RELEASES},
        "cuda": machine.cuda_runtime,
        "driver": machine.cuda_driver,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
