"""Compiles what the `cute` backend launches for sm_90a, on a machine without a GPU; prints JSON.

A program of its own, since QuACK is told before it is used that it shall only compile, and for
what; it keeps what it made in the folder that QUACK_CACHE_DIR names. The answer maps each product
to the launches that compiled, as in `cute.LAUNCHES`.
"""

import json
import os
import sys
from collections.abc import Callable

os.environ["CUTE_DSL_ARCH"] = "sm_90a"

import quack.cache_utils
import quack.gemm
import quack.gemm_act
import quack.gemm_dact
import torch
from cutlass.base_dsl.common import DSLRuntimeError
from nmoe_kernels.gemm import cute
from nmoe_kernels.gemm.plan import RowPlan

TOKENS, SLOTS, EXPERTS, WIDTH, EXPERT_WIDTH = 64, 2, 4, 128, 64


def main() -> None:
    """Compiles every product with each of its launches."""
    quack.cache_utils.COMPILE_ONLY = True
    for module in (quack.gemm, quack.gemm_act, quack.gemm_dact):
        module.get_device_capacity = lambda device: (9, 0)
    compiled: dict[str, list[str]] = {}
    for name, product in products().items():
        launches = cute.LAUNCHES[name]
        for launch in launches:
            cute.LAUNCHES[name] = (launch,)
            despite_no_driver(product)
            compiled.setdefault(name, []).append(repr(launch))
        cute.LAUNCHES[name] = launches
    sys.stdout.write(json.dumps(compiled))


def products() -> dict[str, Callable[[], object]]:
    """The functions of the backend on tensors of a small layer, which nothing is computed of."""

    def integers(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def numbers(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    rows = TOKENS * SLOTS
    plan = RowPlan(
        token_P=integers(rows),
        flat_P=integers(0),
        inverse_TK=integers(TOKENS, SLOTS),
        offsets_E1=integers(EXPERTS + 1),
        ends_E=integers(EXPERTS),
        tile_expert_N=integers(0),
        tiles=integers(1),
    )
    x, h, a = numbers(TOKENS, WIDTH), numbers(rows, 2 * EXPERT_WIDTH), numbers(rows, EXPERT_WIDTH)
    gate_up = numbers(EXPERTS, 2 * EXPERT_WIDTH, WIDTH)
    down, counters = numbers(EXPERTS, WIDTH, EXPERT_WIDTH), integers(len(cute.LAUNCHES))
    weight_P, last = torch.zeros(rows), (plan, counters)
    return {
        "up": lambda: [cute._up(x, gate_up, plan, keep_h, counters) for keep_h in (True, False)],
        "down": lambda: cute._down(a, down, *last),
        "grad_h": lambda: cute._swiglu_gradients(x, down, h, h, a, weight_P, *last),
        "grad_x": lambda: cute._grad_x(h, gate_up, *last),
        "grad_down": lambda: cute._weight_grad("grad_down", x, a, down, *last),
        "grad_gate_up": lambda: cute._weight_grad("grad_gate_up", x, h, gate_up.mT, *last),
    }


def despite_no_driver(product: Callable[[], object]) -> None:
    """Compiles; the compiler asks for a driver once, and complains if there is none."""
    try:
        product()
    except DSLRuntimeError as complaint:
        if "Driver" not in str(complaint):
            raise
        product()


if __name__ == "__main__":
    main()
