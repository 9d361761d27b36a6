"""The common part of the benchmarks: verify each contender, time all in turns, weigh by ceilings.

A contender whose error against fp64 is above the tolerance of its dtype, or that fails, is reported
with the reason and not timed. The ceiling is a contender as well, in the same rounds: a dense
product of the same FLOPs, or a read of the same bytes. A share is its time over the contender's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nmoe_kernels.bench.timing import Times, peak_gib, time_together
from nmoe_kernels.hardware import dtype_name

# Rounding of the format, through three products; norm over norm.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Cost:
    """What a pass must do: floating-point operations, and the fewest bytes it can move."""

    flops: float
    bytes: float


@dataclass
class Contender:
    """Something to time.

    passes: works by name ("forward", "both"). error: compares it with fp64 and gives the greatest
    relative error; None for a ceiling, which has nothing to compare. held_bytes: its inputs.
    absent: why it cannot run here. note: how it differs from the others.
    """

    name: str
    passes: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    error: Callable[[], float] | None = None
    held_bytes: int = 0
    absent: str = ""
    note: str = ""
    is_ceiling: bool = False


@dataclass
class Measurement:
    """One contender on one shape and routing; `times` is empty where it was not timed."""

    shape: str
    routing: str
    dtype: str
    contender: str
    error: float | None = None
    """Greatest relative error against fp64; None where nothing was compared."""
    times: dict[str, Times] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    gbps: dict[str, float] = field(default_factory=dict)
    """The fewest bytes a pass can move, over its time, in 1e9 bytes a second."""
    share: dict[str, float] = field(default_factory=dict)
    """The ceiling's time over this one's."""
    peak_gib: float | None = None
    first_call_cold_s: float | None = None
    first_call_warm_s: float | None = None
    note: str = ""

    def flat(self) -> dict[str, Any]:
        """One level of names and values: "forward_ms", "forward_tflops", "both_ms", ..."""
        row = {
            name: getattr(self, name)
            for name in ("shape", "routing", "dtype", "contender", "error")
        }
        for name, times in self.times.items():
            row |= {f"{name}_{key}": value for key, value in asdict(times).items()}
            for key in ("tflops", "gbps", "share"):
                row[f"{name}_{key}"] = getattr(self, key).get(name)
        ends = ("peak_gib", "first_call_cold_s", "first_call_warm_s", "note")
        return row | {name: getattr(self, name) for name in ends}


def measure(
    contenders: Sequence[Contender],
    costs: Mapping[str, Cost],
    label: tuple[str, str],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    tolerance: float | None = None,
) -> list[Measurement]:
    """Verifies and times the contenders on one problem.

    label: shape and routing. tolerance: of the error; None for that of the dtype.
    """
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    found = {
        c.name: Measurement(*label, dtype_name(dtype), c.name, note=c.note) for c in contenders
    }
    fit = [c for c in contenders if _verify(c, found[c.name], tolerance)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for name, cost in costs.items():
        works = {c.name: c.passes[name] for c in fit if name in c.passes}
        times = time_together(works, device, repeats)
        ceiling = next((times[c.name].ms for c in fit if c.is_ceiling and c.name in times), None)
        for of, taken in times.items():
            _weigh(found[of], name, taken, cost, ceiling)
    for one in fit:
        *_, last = one.passes.values()
        found[one.name].peak_gib = peak_gib(last, device, one.held_bytes)
    return list(found.values())


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The greatest norm of a difference over the norm of what is wanted; inf if not a number."""
    errors = [_distance(one, other) for one, other in zip(got, want, strict=True)]
    return max((error if error == error else float("inf") for error in errors), default=0.0)


def _distance(got: Tensor, want: Tensor) -> float:
    difference = torch.linalg.vector_norm(got.double() - want.double())
    # What is wanted may be exactly 0 (a gradient of a constant): then any other value is wrong.
    scale = torch.linalg.vector_norm(want.double()).clamp_min(torch.finfo(torch.float64).tiny)
    return float(difference / scale)


def _verify(contender: Contender, found: Measurement, tolerance: float) -> bool:
    """Whether the contender is to be timed; if not, `found.note` says why."""
    if contender.absent:
        found.note = contender.absent
        return False
    if contender.error is None:
        return True
    try:
        found.error = contender.error()
    except Exception as failure:  # a peer's failure is news about the peer, whatever it raised
        found.note = f"failed: {_first_line(failure)}"
        return False
    # Written so that NaN is wrong.
    if not found.error <= tolerance:
        found.note = f"wrong: the error is {found.error:.1e}, above {tolerance:g}; not timed"
        return False
    return True


def _weigh(
    found: Measurement, name: str, taken: Times, cost: Cost, ceiling_ms: float | None
) -> None:
    found.times[name] = taken
    found.tflops[name] = cost.flops / taken.ms / 1e9
    found.gbps[name] = cost.bytes / taken.ms / 1e6
    if ceiling_ms is not None:
        found.share[name] = ceiling_ms / taken.ms


def _first_line(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
