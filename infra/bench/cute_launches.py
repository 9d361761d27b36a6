"""Times launches of the products of the `cute` backend at the sizes of the benchmark's layers.

`LAUNCHES` in nmoe_kernels/gemm/cute.py is chosen from these; its tests compare with fp64. Needs
an H200 and `pip install nmoe-kernels[cute]`. Candidates take turns, and each is a new compilation.

    python infra/bench/cute_launches.py infra/bench/results/cute-launches-h200.json
"""

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from nmoe_kernels.bench.command import hardware
from nmoe_kernels.bench.gemm import costs, random_rows
from nmoe_kernels.bench.inputs import ROUTINGS
from nmoe_kernels.bench.shapes import LAYERS, Shape
from nmoe_kernels.bench.timing import time_together
from nmoe_kernels.gemm import cute
from nmoe_kernels.gemm.cute import CuteLaunch
from nmoe_kernels.gemm.plan import plan_rows

REPEATS = 5
WIDE = [CuteLaunch(128, 256, (2, 1), False, dynamic) for dynamic in (False, True)]
TALL = [CuteLaunch(256, columns, (2, 1), False) for columns in (128, 160, 192)]
PINGPONG = [CuteLaunch(128, columns) for columns in (128, 160, 192)]
ALONE = [CuteLaunch(128, 128, (1, 1)), CuteLaunch(128, 256, (1, 1), False)]
PAIRED = [CuteLaunch(128, 192, (1, 2), True, dynamic) for dynamic in (False, True)]
WIDE_PAIRED = [CuteLaunch(128, 256, (1, 2), False, dynamic) for dynamic in (False, True)]
GATHERED = [*WIDE, *TALL, *PINGPONG, *ALONE]
SORTED = [*GATHERED, CuteLaunch(192, 128), CuteLaunch(128, 208), *PAIRED, *WIDE_PAIRED]
CANDIDATES = {
    "up": GATHERED,
    "down": SORTED,
    "grad_h": GATHERED,
    "grad_x": SORTED,
    "grad_down": GATHERED,
    "grad_gate_up": GATHERED,
}


def main(path: Path) -> None:
    """Times all products of all layers, and writes rows with their launch, ms and TFLOP/s."""
    report: dict[str, Any] = {"bench": "cute launches", "hardware": hardware("cuda"), "rows": []}
    for shape, routing in itertools.product(LAYERS.values(), ROUTINGS):
        report["rows"] += measured(shape, routing)
        path.write_text(json.dumps(report, indent=1) + "\n")


def measured(shape: Shape, routing: str) -> list[dict[str, Any]]:
    """The rows of one layer with one routing."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    given = random_rows(shape, routing, dtype, device)
    x, h, a, gate_up, down = given.x, given.grad_h, given.a, given.gate_up, given.down
    plan = plan_rows(given.ids_TK, shape.experts, tile_rows=1)
    weights = torch.rand(shape.tokens, shape.top_k, device=device)

    def counters() -> torch.Tensor:
        """Zeros, and a kernel between them and the product, which starts early."""
        zeros = cute._counters(x)
        weights.mul_(1.0)
        return zeros

    grad_h, weighted_a = torch.empty_like(h), torch.empty_like(a)
    grad_gate_up, grad_down = torch.empty_like(gate_up), torch.empty_like(down)
    products = {
        "up": lambda: cute._up(x, gate_up, plan, True, counters()),
        "down": lambda: cute._down(a, down, plan, counters()),
        "grad_h": lambda: cute._grad_h(
            given.grad_y, weights, down, h, grad_h, weighted_a, plan, counters()
        ),
        "grad_x": lambda: cute._grad_x(h, gate_up, plan, counters()),
        "grad_down": lambda: cute._weight_grad(
            "grad_down", given.grad_y, a, grad_down, plan, counters()
        ),
        "grad_gate_up": lambda: cute._weight_grad(
            "grad_gate_up", x, h, grad_gate_up.mT, plan, counters()
        ),
    }
    rows = []
    for name, product in products.items():

        def launched(launch: CuteLaunch, name: str = name, product: Any = product) -> None:
            cute.LAUNCHES[name] = (launch,)
            product()

        works = {
            str(number): lambda launch=launch, launched=launched: launched(launch)
            for number, launch in enumerate(CANDIDATES[name])
        }
        kept = cute.LAUNCHES[name]
        times = time_together(works, device, REPEATS)
        cute.LAUNCHES[name] = kept
        flops = costs(shape, dtype)["grad_a" if name == "grad_h" else name].flops
        for number, launch in enumerate(CANDIDATES[name]):
            ms = times[str(number)].ms
            row = {"shape": str(shape), "routing": routing, "product": name, **asdict(launch)}
            rows.append(row | {"ms": ms, "tflops": flops / ms / 1e9})
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]))
