"""Time and memory of a piece of work, on the GPU by events and elsewhere by the host's clock."""

import statistics
import time
from collections.abc import Callable

import torch

# Larger than any L2, so that a repetition does not find the inputs of the one before.
FLUSHED_BYTES = 256 << 20


def median_ms(
    work: Callable[[], object], device: torch.device, repeats: int
) -> tuple[float, float]:
    """Median time of `work` in milliseconds, and the distance between the quartiles.

    Two runs before the first measured one; on CUDA the L2 is overwritten before each.
    """
    for _ in range(2):
        work()
    times = [_once(work, device) for _ in range(repeats)]
    low, median, high = statistics.quantiles(times, n=4) if repeats > 1 else times * 3
    return median, high - low


def peak_gib(work: Callable[[], object], device: torch.device) -> float | None:
    """Peak of CUDA's allocator while `work` runs, in GiB; None elsewhere."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return (time.perf_counter() - start_s) * 1e3
    torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device).zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)
