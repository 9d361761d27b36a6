"""Measures the transports of the expert exchange on all ranks of torchrun; rank 0 reports.

Every contender's round trip is compared with fp64 before it is timed. Contenders take turns; a
time is that of several calls back to back, the longest of all ranks, so that it holds whoever comes
last. The ceiling is a copy between the GPUs, both ways at once, in the same rounds: a share is the
time in which the copy would move the bytes that must cross, over the contender's.

Letters: R ranks, T tokens of each rank, H width, E experts, K experts per token.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from rich.console import Console
from torch import Tensor

from nmoe_kernels.bench import output
from nmoe_kernels.bench.command import chosen, hardware
from nmoe_kernels.bench.exchange.contenders import (
    Contender,
    all_to_all,
    all_to_all_on_device,
    open_group,
    ours,
)
from nmoe_kernels.bench.exchange.problem import Exchange, draw_exchange, most_crossing
from nmoe_kernels.bench.exchange.syncs import host_waits
from nmoe_kernels.bench.inputs import ROUTINGS
from nmoe_kernels.bench.measure import TOLERANCE, relative_error
from nmoe_kernels.bench.shapes import RouterShape, parse_shapes
from nmoe_kernels.errors import KernelError
from nmoe_kernels.rdep.plan import plan_source

EXCHANGES: Mapping[str, RouterShape] = {
    "h7168": RouterShape(8192, 7168, 256, 8),
    "h7168-e32": RouterShape(8192, 7168, 32, 8),
    "h4096": RouterShape(8192, 4096, 128, 8),
    "decode": RouterShape(128, 7168, 256, 8),
    "tiny": RouterShape(256, 64, 16, 4),
}
TRANSPORTS = ("p2p", "nvshmem", "collective")
PEERS = {"all_to_all": all_to_all, "vdev2d": all_to_all_on_device}
COPIED_BYTES = 256 << 20
CALLS = 10
# A graph of more tokens shows nothing that the stages do not.
GRAPH_TOKENS = 1024


@dataclass(frozen=True)
class Options:
    """What the benchmark is told."""

    device: str
    shapes: Sequence[str] | None
    routings: str
    dtype: str
    transports: str
    peers: str
    blocks: str
    repeats: int
    json_file: Path | None
    chart_file: Path | None


def run_exchange(options: Options) -> None:
    """Measures on every rank. Raises KernelError E-BENCH."""
    transports = chosen("transport", options.transports, TRANSPORTS)
    peers = chosen("peer", options.peers, tuple(PEERS))
    shapes = parse_shapes(options.shapes, RouterShape, EXCHANGES, options.device)
    routings = chosen("routing", options.routings, ROUTINGS)
    blocks = _numbers(options.blocks)
    types = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}
    if options.dtype not in types:
        what = f"there is no dtype {options.dtype!r}"
        raise KernelError("E-BENCH", what, f"choose from {', '.join(types)}")
    output.check_targets(options.json_file, options.chart_file)
    _check_started(options.device, shapes)
    device = _join(options.device, over_nvshmem="nvshmem" in transports or "vdev2d" in peers)
    bench = _Bench(options, device)
    try:
        for shape in shapes:
            for routing in routings:
                problem = draw_exchange(
                    shape, routing, dist.get_rank(), device, types[options.dtype]
                )
                bench.measure(problem, routing, transports, peers, blocks)
    finally:
        dist.destroy_process_group()


def _check_started(device: str, shapes: Sequence[RouterShape]) -> None:
    """Refuses what these processes cannot measure, before they meet."""
    if "WORLD_SIZE" not in os.environ:
        raise KernelError(
            "E-BENCH",
            "the exchange is measured between processes, and this is one alone",
            "start it with torchrun --nproc-per-node N -m nmoe_kernels bench rdep ...",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise KernelError("E-BENCH", "there is no device 'cuda' here", "give --device cpu")
    ranks = int(os.environ["WORLD_SIZE"])
    for shape in shapes:
        if shape.experts % ranks:
            what = f"{ranks} processes do not divide the {shape.experts} experts of {shape}"
            raise KernelError("E-BENCH", what, "start a number that does, or give another --shape")


def _join(device: str, over_nvshmem: bool) -> torch.device:
    """Joins the processes. over_nvshmem: takes symmetric memory from NVSHMEM, if it is there."""
    if device != "cuda":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=place)
    if over_nvshmem and symmetric.is_nvshmem_available():
        # One process has one kind; p2p runs on either.
        symmetric.set_backend("NVSHMEM")
    return place


class _Bench:
    """The report that grows by measurements."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options, self.device = options, device
        self.console = Console(soft_wrap=True, highlight=False, markup=False)
        self.copy_gbps = _copy_gbps(device, options.repeats)
        self.report: dict[str, Any] = {
            "bench": "rdep",
            "hardware": hardware(device.type),
            "ranks": dist.get_world_size(),
            "repeats": options.repeats,
            "copy_gbps": self.copy_gbps,
            "rows": [],
        }
        rate = "" if self.copy_gbps is None else f", copy between GPUs {self.copy_gbps:.0f} GB/s"
        name = self.report["hardware"]["device"]
        self._say(f"{dist.get_world_size()} x {name}, {options.dtype}{rate}")

    def measure(
        self,
        problem: Exchange,
        routing: str,
        transports: Sequence[str],
        peers: Sequence[str],
        blocks: Sequence[int],
    ) -> None:
        """Verifies and times all contenders on one problem."""
        self._say(f"{problem.shape}, {routing}")
        plan = plan_source(problem.ids, problem.shape.experts, dist.get_world_size())
        row_bytes = problem.shape.width * problem.x.dtype.itemsize
        crossing = most_crossing(_gathered(plan.rows_R)) * row_bytes
        groups, contenders = [], []
        for name in transports:
            try:
                group = open_group(problem, name)
            except KernelError as reason:
                self._add({"contender": name, "note": str(reason)}, problem, routing)
                continue
            groups.append(group)
            told = blocks if hasattr(group.link, "blocks") else [None]
            contenders += [ours(problem, group, number) for number in told]
        for name in peers:
            if name == "vdev2d" and not _over_nvshmem(self.device):
                note = "not here: it needs CUDA and NVSHMEM"
                self._add({"contender": name, "note": note}, problem, routing)
                continue
            try:
                contenders.append(PEERS[name](problem))
            except RuntimeError as reason:
                note = f"not here: {str(reason).splitlines()[0]}"
                self._add({"contender": name, "note": note}, problem, routing)
        rows = {c.name: self._verified(c, problem) for c in contenders}
        sound = [c for c in contenders if "note" not in rows[c.name]]
        for stage in ("plan", "dispatch", "combine"):
            works = {c.name: getattr(c, stage) for c in sound if getattr(c, stage) is not None}
            for name, times in self._time(works).items():
                rows[name] |= {f"{stage}_{key}": value for key, value in times.items()}
                if stage != "plan":
                    rows[name] |= self._rates(stage, times["ms"], crossing)
        for contender in sound:
            if problem.shape.tokens <= GRAPH_TOKENS and self.device.type == "cuda":
                rows[contender.name] |= self._graph(contender, problem)
        for group in groups:
            if self.device.type == "cuda":
                waits = host_waits(problem, group)
                for name, row in rows.items():
                    if name.split(",")[0] == group.transport:
                        row["host_waits_per_layer"] = waits
            group.check()
            group.close()
        for row in rows.values():
            self._add({**row, "crossing_bytes": crossing}, problem, routing)

    def _verified(self, contender: Contender, problem: Exchange) -> dict[str, Any]:
        error = _greatest(relative_error([contender.round_trip()], [problem.wanted()]), self.device)
        row: dict[str, Any] = {"contender": contender.name, "error": error}
        tolerance = TOLERANCE[problem.x.dtype]
        if not error <= tolerance:
            row["note"] = f"wrong: the error is {error:.1e}, above {tolerance:g}; not timed"
        if contender.blocks is not None:
            row["blocks"] = contender.blocks
        return row

    def _time(self, works: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        taken: dict[str, list[float]] = {name: [] for name in works}
        for work in works.values():
            work()
        for _ in range(self.options.repeats):
            for name, work in works.items():
                taken[name].append(_greatest(_once(work, self.device, CALLS), self.device))
        return {name: _spread(ms) for name, ms in taken.items()}

    def _rates(self, stage: str, ms: float, crossing: int) -> dict[str, float]:
        gbps = crossing / ms / 1e6
        rates = {f"{stage}_gbps": gbps}
        return (
            rates if self.copy_gbps is None else rates | {f"{stage}_share": gbps / self.copy_gbps}
        )

    def _graph(self, contender: Contender, problem: Exchange) -> dict[str, float]:
        """Plan, dispatch and combine, replayed from a captured graph."""
        if contender.blocks is None or contender.plan is None:
            return {}
        plan = contender.plan

        def layer() -> None:
            plan()
            contender.dispatch()
            contender.combine()

        layer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer()
        times = self._time({"graph": graph.replay})["graph"]
        return {f"graph_{key}": value for key, value in times.items()}

    def _add(self, row: dict[str, Any], problem: Exchange, routing: str) -> None:
        row = {"shape": str(problem.shape), "routing": routing, **row}
        self.report["rows"].append(row)
        self._say(_line(row))
        if dist.get_rank() == 0 and self.options.json_file is not None:
            output.write(self.options.json_file, json.dumps(self.report, indent=1) + "\n")
        if dist.get_rank() == 0 and self.options.chart_file is not None:
            output.write(self.options.chart_file, _chart(self.report["rows"]))

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            self.console.print(text)


def _over_nvshmem(device: torch.device) -> bool:
    return device.type == "cuda" and symmetric.get_backend(device) == "NVSHMEM"


def _once(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Milliseconds of one of several calls back to back, all ranks starting together."""
    if device.type != "cuda":
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start_s) * 1e3 / calls
    torch.cuda.synchronize()
    dist.barrier(device_ids=[device.index])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The host runs ahead meanwhile, so that what is timed is the work of the GPU.
    torch.cuda._sleep(2_000_000)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def _gathered(rows_R: Tensor) -> Tensor:
    """int64 [R, R]: the rows of every rank for every rank."""
    parts = [torch.empty_like(rows_R) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows_R)
    return torch.stack(parts)


def _copy_gbps(device: torch.device, repeats: int) -> float | None:
    """Rate of a copy into a peer's memory while the peer copies into ours; None off CUDA."""
    if device.type != "cuda" or dist.get_world_size() == 1:
        return None
    everyone = dist.group.WORLD
    assert everyone is not None
    mine = symmetric.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    mapped = symmetric.rendezvous(mine, everyone)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    theirs = mapped.get_buffer(peer, (COPIED_BYTES,), torch.uint8)
    source = torch.zeros_like(mine)
    taken = [
        _greatest(_once(lambda: theirs.copy_(source), device, 4), device) for _ in range(repeats)
    ]
    return COPIED_BYTES / statistics.median(taken) / 1e6


def _greatest(value: float, device: torch.device) -> float:
    """The greatest over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _spread(ms: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else ms * 3
    return {"ms": median, "min_ms": min(ms), "p25_ms": low, "p75_ms": high}


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise KernelError("E-BENCH", f"--blocks is {text!r}", "write numbers with commas: 8,16,32")
    return numbers


def _line(row: Mapping[str, Any]) -> str:
    if "dispatch_ms" not in row:
        return f"  {row['contender']:16s} {row['note']}"
    parts = [f"  {row['contender']:16s}"]
    for stage in ("dispatch", "combine"):
        share = f" {row[f'{stage}_share']:4.0%}" if f"{stage}_share" in row else ""
        parts.append(f"{stage} {row[f'{stage}_ms']:.3f} ms {row[f'{stage}_gbps']:.3g} GB/s{share} ")
    if "plan_ms" in row:
        parts.append(f"plan {row['plan_ms'] * 1e3:.0f} us")
    if "graph_ms" in row:
        parts.append(f"graph {row['graph_ms'] * 1e3:.0f} us")
    if "host_waits_per_layer" in row:
        parts.append(f"host waits {row['host_waits_per_layer']}")
    return " ".join([*parts, f"error {row['error']:.1e}"])


def _chart(rows: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        for stage in ("dispatch", "combine"):
            if f"{stage}_gbps" in row:
                group = groups.setdefault(f"{row['shape']} {row['routing']}: {stage}", [])
                group.append((row["contender"], row[f"{stage}_gbps"]))
    return output.bars("exchange, GB/s of the bytes that must cross", groups)
