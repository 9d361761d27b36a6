"""Finds the fastest launch of each product for a layer's sizes on this GPU.

A candidate must give what the default gives, up to the rounding of the format, before it is timed.
All candidates of a product are timed in turns, and one replaces the default only if it is faster by
more than MARGIN, since medians on a shared machine differ by as much.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from nmoe_kernels.bench.gemm import PRODUCTS, WEIGHT_GRADIENTS, Work, our_products, random_rows
from nmoe_kernels.bench.measure import TOLERANCE, relative_error
from nmoe_kernels.bench.shapes import LAYERS, Shape, parse_shapes
from nmoe_kernels.bench.timing import Times, time_together
from nmoe_kernels.errors import KernelError
from nmoe_kernels.gemm.launches import CANDIDATES, Launch, Product, entry, forced, remember
from nmoe_kernels.hardware import dtype_name, why_unusable

MARGIN = 0.02


@dataclass(frozen=True)
class Choice:
    """A product's candidates with their times, those left out with the reason, and the best one."""

    product: Product
    times: dict[Launch, Times]
    refused: dict[Launch, str]
    best: Launch


def run_tune(shapes: Sequence[str] | None, dtype: str, repeats: int) -> None:
    """Tunes for each shape, prints what was chosen, and keeps it for this GPU.

    Raises KernelError: E-BENCH for a bad shape, E-BACKEND-UNAVAILABLE where the kernels cannot run,
    or those of `remember`.
    """
    types = {dtype_name(known): known for known in TOLERANCE}
    if dtype not in types:
        raise KernelError(
            "E-BENCH", f"there is no dtype {dtype!r}", f"choose from {', '.join(types)}"
        )
    refusal = why_unusable("triton", "cuda", types[dtype])
    if refusal is not None:
        raise KernelError("E-BACKEND-UNAVAILABLE", f"nothing to tune: {refusal}", "see doctor")
    device, console = torch.device("cuda"), Console(soft_wrap=True, highlight=False, markup=False)
    for shape in parse_shapes(shapes, Shape, LAYERS, "cuda"):
        console.print(str(shape))
        chosen = {}
        for choice in tune(shape, types[dtype], device, repeats):
            console.print(_line(choice))
            chosen[entry(choice.product, *sizes(choice.product, shape))] = choice.best
        console.print(f"kept in {remember(chosen, device)}")


def sizes(product: Product, shape: Shape) -> tuple[int, int]:
    """What `launch_for` is asked with for a layer of this shape."""
    width, inner = shape.width, shape.expert_width
    return {
        "up": (width, 2 * inner),
        "down": (inner, width),
        "grad_a": (width, inner),
        "grad_x": (2 * inner, width),
        "grad_down": (width, inner),
        "grad_gate_up": (2 * inner, width),
    }[product]


def _line(choice: Choice) -> str:
    default = CANDIDATES[choice.product][0]
    best_ms = choice.times[choice.best].ms
    gain = choice.times[default].ms / best_ms
    best = "the default" if choice.best == default else str(choice.best)
    out = "".join(f"\n  left out {launch}: {why}" for launch, why in choice.refused.items())
    return f"  {choice.product:12s} {best_ms:8.3f} ms ({gain:.2f}x) {best}{out}"


def tune(shape: Shape, dtype: torch.dtype, device: torch.device, repeats: int) -> Iterator[Choice]:
    """Times the candidates of one product after the other."""
    products, place_M = our_products(random_rows(shape, "uniform", dtype, device))
    for product in PRODUCTS:
        real = slice(None) if product in WEIGHT_GRADIENTS else place_M
        yield _choose(product, products[product], real, device, TOLERANCE[dtype], repeats)


def _choose(
    product: Product,
    work: Work,
    real: slice | Tensor,
    device: torch.device,
    tolerance: float,
    repeats: int,
) -> Choice:
    """real: the rows of a result that are no padding."""
    default, *others = CANDIDATES[product]
    truth = _under(product, default, work)()[real].clone()
    refused = {launch: _refusal(product, launch, work, real, truth, tolerance) for launch in others}
    fit = [default, *(launch for launch in others if not refused[launch])]
    times = time_together(
        {str(number): _under(product, launch, work) for number, launch in enumerate(fit)},
        device,
        repeats,
    )
    by_launch = dict(zip(fit, times.values(), strict=True))
    fastest = min(fit, key=lambda launch: by_launch[launch].ms)
    better = by_launch[fastest].ms < (1 - MARGIN) * by_launch[default].ms
    reasons = {launch: reason for launch, reason in refused.items() if reason}
    return Choice(product, by_launch, reasons, fastest if better else default)


def _under(product: Product, launch: Launch, work: Work) -> Work:
    def launched() -> Tensor:
        with forced(product, launch):
            return work()

    return launched


def _refusal(
    product: Product,
    launch: Launch,
    work: Work,
    real: slice | Tensor,
    truth: Tensor,
    tolerance: float,
) -> str:
    """Why a candidate is not to be timed, or ""."""
    try:
        error = relative_error([_under(product, launch, work)()[real]], [truth])
    except Exception as failure:  # the compiler and the driver raise types of their own
        return str(failure).splitlines()[0]
    return "" if error <= tolerance else f"wrong: the error is {error:.1e}"
