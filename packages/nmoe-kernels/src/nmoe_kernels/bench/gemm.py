"""The six products of the experts, one by one: ours, torch's grouped_mm, and dense ones.

up [M, 2*I] = x W_gate_up^T, down [M, H] = a W_down^T; the gradients of what they multiply, grad_a
[M, I] and grad_x [M, H]; and those of the weights, grad_down [E, H, I] and grad_gate_up
[E, 2*I, H]. Ours gathers the tokens of `up` and applies SwiGLU inside the product; grouped_mm is
given rows that are gathered and sorted, and its time is of the product alone.

Letters: T tokens, H width, I expert width, E experts, K experts per token, M = T*K rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe_kernels.bench.inputs import routed_tokens
from nmoe_kernels.bench.measure import Contender, Cost, Measurement, measure, relative_error
from nmoe_kernels.bench.shapes import Shape
from nmoe_kernels.gemm.launches import Product
from nmoe_kernels.grouping import group_rows
from nmoe_kernels.hardware import why_unusable
from nmoe_kernels.router import RouterConfig
from nmoe_kernels.router.reference import route_reference

PRODUCTS: tuple[Product, ...] = get_args(Product)
WEIGHT_GRADIENTS = ("grad_down", "grad_gate_up")
CONTENDERS = ("triton", "grouped_mm")
DENSE_NOTE = "ceiling: dense products of the same FLOPs"

Work = Callable[[], Tensor]


@dataclass
class Rows:
    """Inputs of the products: x [T, H], and in order of assignment a [M, I], grad_y [M, H] and
    grad_h [M, 2*I]; the experts of each token; gate_up [E, 2*I, H] and down [E, H, I].
    """

    shape: Shape
    ids_TK: Tensor
    x: Tensor
    a: Tensor
    grad_y: Tensor
    grad_h: Tensor
    gate_up: Tensor
    down: Tensor

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


def measure_gemm(
    shape: Shape,
    routing: str,
    dtype: torch.dtype,
    device: torch.device,
    contenders: Sequence[str] = CONTENDERS,
    repeats: int = 20,
) -> list[Measurement]:
    """Verifies and times each product by each contender on one shape and routing."""
    rows = random_rows(shape, routing, dtype, device)
    builders = {"triton": our_products, "grouped_mm": grouped_products}
    found = [_contender(name, rows, builders[name]) for name in contenders]
    dense, held = dense_products(shape, rows.x)
    found.append(Contender("dense", dense, held_bytes=held, note=DENSE_NOTE, is_ceiling=True))
    return measure(found, costs(shape, dtype), (str(shape), routing), dtype, device, repeats)


def random_rows(shape: Shape, routing: str, dtype: torch.dtype, device: torch.device) -> Rows:
    """Random inputs of unit scale, for tokens that follow a routing."""
    x, router = routed_tokens(shape.router, routing, device, dtype)
    config = RouterConfig(shape.experts, shape.top_k, "softmax")
    generator = torch.Generator(device).manual_seed(2)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.empty(size, device=device, dtype=dtype)
        return values.normal_(std=scale, generator=generator)

    width, inner = shape.width, shape.expert_width
    return Rows(
        shape=shape,
        ids_TK=route_reference(x, router, config).ids_TK,
        x=x,
        a=normal(shape.rows, inner),
        grad_y=normal(shape.rows, width),
        grad_h=normal(shape.rows, 2 * inner),
        gate_up=normal(shape.experts, 2 * inner, width, scale=width**-0.5),
        down=normal(shape.experts, width, inner, scale=inner**-0.5),
    )


def costs(shape: Shape, dtype: torch.dtype) -> dict[str, Cost]:
    """FLOPs, and the bytes of operands and result, of each product."""
    rows, width, inner = shape.rows, shape.width, shape.expert_width
    sizes = {
        "up": (width, 2 * inner),
        "down": (inner, width),
        "grad_a": (width, inner),
        "grad_x": (2 * inner, width),
        "grad_down": (width, inner),
        "grad_gate_up": (2 * inner, width),
    }
    return {
        name: Cost(
            2.0 * rows * one * other,
            float(dtype.itemsize) * (rows * (one + other) + shape.experts * one * other),
        )
        for name, (one, other) in sizes.items()
    }


def dense_products(shape: Shape, like: Tensor) -> tuple[dict[str, Work], int]:
    """Products of the same FLOPs with one weight for all rows, and the bytes they work on."""
    inner = shape.expert_width
    sizes = ((shape.rows, shape.width), (shape.rows, 2 * inner), (2 * inner, shape.width))
    # Random, as on zeros a GPU draws less power and runs faster.
    rows, hidden, gate_up = (torch.randn(s, device=like.device, dtype=like.dtype) for s in sizes)
    half, down = hidden[:, :inner].contiguous(), gate_up[:inner].t().contiguous()
    products: dict[str, Work] = {
        "up": lambda: rows @ gate_up.t(),
        "down": lambda: half @ down.t(),
        "grad_a": lambda: rows @ down,
        "grad_x": lambda: hidden @ gate_up,
        "grad_down": lambda: rows.t() @ half,
        "grad_gate_up": lambda: hidden.t() @ rows,
    }
    return products, sum(tensor.nbytes for tensor in (rows, hidden, gate_up, half, down))


def our_products(rows: Rows) -> tuple[dict[str, Work], Tensor]:
    """The Triton kernels on padded rows, and where in them each assignment lies [M]."""
    from nmoe_kernels.gemm import products as ours
    from nmoe_kernels.gemm.plan import plan_rows

    plan = plan_rows(rows.ids_TK, rows.shape.experts)
    place_M = plan.inverse_TK.flatten().long()
    padded = plan.token_P.shape[0]

    def placed(values: Tensor) -> Tensor:
        return values.new_zeros(padded, values.shape[1]).index_copy_(0, place_M, values)

    a, grad_y, grad_h = (placed(values) for values in (rows.a, rows.grad_y, rows.grad_h))
    x_rows = placed(rows.x.repeat_interleave(rows.shape.top_k, 0))
    wide, narrow = torch.empty_like(x_rows), torch.empty_like(a)

    def times(product: Product, left: Tensor, weight: Tensor, out: Tensor) -> Work:
        def work() -> Tensor:
            ours.rows_times_weight(product, left, weight, out, plan)
            return out

        return work

    products: dict[str, Work] = {
        "up": lambda: ours.up(rows.x, rows.gate_up, plan, keep_h=True)[0],
        "down": times("down", a, rows.down, wide),
        "grad_a": times("grad_a", grad_y, rows.down, narrow),
        "grad_x": times("grad_x", grad_h, rows.gate_up, wide),
        "grad_down": lambda: ours.weight_grad("grad_down", grad_y, a, plan, rows.down),
        "grad_gate_up": lambda: ours.weight_grad(
            "grad_gate_up", grad_h, x_rows, plan, rows.gate_up
        ),
    }
    return products, place_M


def grouped_products(rows: Rows) -> tuple[dict[str, Work], Tensor]:
    """torch's grouped_mm on sorted rows, and where in them each assignment lies [M]."""
    grouping = group_rows(rows.ids_TK, rows.shape.experts)
    order, ends = grouping.order_M, grouping.offsets_E1[1:]
    a, grad_y, grad_h = (values[order] for values in (rows.a, rows.grad_y, rows.grad_h))
    x_rows = rows.x[grouping.token_M]
    products: dict[str, Work] = {
        "up": lambda: F.grouped_mm(x_rows, rows.gate_up.mT, offs=ends),
        "down": lambda: F.grouped_mm(a, rows.down.mT, offs=ends),
        "grad_a": lambda: F.grouped_mm(grad_y, rows.down, offs=ends),
        "grad_x": lambda: F.grouped_mm(grad_h, rows.gate_up, offs=ends),
        "grad_down": lambda: F.grouped_mm(grad_y.t(), a, offs=ends),
        "grad_gate_up": lambda: F.grouped_mm(grad_h.t(), x_rows, offs=ends),
    }
    return products, grouping.inverse_TK.flatten()


def products_error(rows: Rows, products: Mapping[str, Work], place_M: Tensor) -> float:
    """The greatest relative error of all products against fp64, expert by expert."""
    errors = []
    for name in PRODUCTS:
        result, want = products[name](), _in_fp64(rows, name)
        if name in WEIGHT_GRADIENTS:
            # grouped_mm leaves garbage where an expert has no rows; its callers clear it.
            busy = torch.bincount(rows.ids_TK.flatten(), minlength=rows.shape.experts) > 0
            result, want = result[busy], want[busy]
        else:
            result = result[place_M]
        errors.append(relative_error([result], [want]))
    return max(errors)


def _contender(
    name: str, rows: Rows, build: Callable[[Rows], tuple[dict[str, Work], Tensor]]
) -> Contender:
    backend = {"triton": "triton", "grouped_mm": "torch"}[name]
    absent = why_unusable(backend, rows.x.device.type, rows.x.dtype)
    if absent:
        return Contender(name, absent=absent)
    products, place_M = build(rows)
    note = "up with gather and SwiGLU" if name == "triton" else "rows gathered and sorted before"
    return Contender(
        name,
        products,
        lambda: products_error(rows, products, place_M),
        rows.held_bytes,
        note=note,
    )


def _in_fp64(rows: Rows, name: str) -> Tensor:
    """A product by its definition: [M, N] in order of assignment, or [E, out, in]."""
    x = rows.x.repeat_interleave(rows.shape.top_k, 0)
    left, right = {
        "up": (x, rows.gate_up.mT),
        "down": (rows.a, rows.down.mT),
        "grad_a": (rows.grad_y, rows.down),
        "grad_x": (rows.grad_h, rows.gate_up),
        "grad_down": (rows.grad_y, rows.a),
        "grad_gate_up": (rows.grad_h, x),
    }[name]
    expert_M = rows.ids_TK.flatten()
    chosen = [(expert_M == e).nonzero().squeeze(1) for e in range(rows.shape.experts)]
    if name in WEIGHT_GRADIENTS:
        return torch.stack([left[own].double().t() @ right[own].double() for own in chosen])
    out = left.new_empty(left.shape[0], right.shape[2], dtype=torch.float64)
    for e, own in enumerate(chosen):
        out[own] = left[own].double() @ right[e].double()
    return out
