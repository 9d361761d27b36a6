"""Time and memory of pieces of work, on the GPU by events and elsewhere by the host's clock.

Contenders are timed in turns, one run of each a round, so that a clock that drifts drifts for all,
and in a random order: the GPU's clock depends on what it has just been doing.
Before each run on a GPU the L2 is overwritten, several times over: the host then runs ahead while
the GPU is busy, and what is timed is the work on the GPU, as in a training step. Work that makes
the host wait shows that it does.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Larger than any L2, so that a repetition does not find the inputs of the one before.
FLUSHED_BYTES = 256 << 20
FLUSHES = 32
WARM_RUNS = 2


@dataclass(frozen=True)
class Times:
    """Milliseconds of `runs` runs: the least, the quartiles and the median."""

    ms: float
    min_ms: float
    p25_ms: float
    p75_ms: float
    runs: int


def time_together(
    works: Mapping[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, Times]:
    """Times every work `repeats` times, in turns; each round draws its order."""
    for work in works.values():
        for _ in range(WARM_RUNS):
            work()
    names = list(works)
    taken: dict[str, list[float]] = {name: [] for name in names}
    shape = (FLUSHED_BYTES,) if device.type == "cuda" else (0,)
    flushed = torch.empty(shape, dtype=torch.int8, device=device)
    orders = random.Random(0)
    for _ in range(repeats):
        for name in orders.sample(names, len(names)):
            taken[name].append(_once(works[name], device, flushed))
    return {name: _summary(ms) for name, ms in taken.items()}


def peak_gib(work: Callable[[], object], device: torch.device, held_bytes: int) -> float | None:
    """What `work` allocates at its peak, and what it is given to work on, in GiB; CUDA only.

    Memory that others hold at the time does not count.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before + held_bytes) / 2**30


def _once(work: Callable[[], object], device: torch.device, flushed: Tensor) -> float:
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return (time.perf_counter() - start_s) * 1e3
    for _ in range(FLUSHES):
        flushed.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def _summary(ms: list[float]) -> Times:
    low, median, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else ms * 3
    return Times(ms=median, min_ms=min(ms), p25_ms=low, p75_ms=high, runs=len(ms))
