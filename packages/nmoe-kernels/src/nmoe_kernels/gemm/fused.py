"""The expert MLP on fused kernels, for 16-bit floats on CUDA: rows are sorted without a host read.

The plan of rows, the sum of a token's rows and what autograd and torch.compile are told are here;
the products are those of a backend: `gemm/triton.py`, or `gemm/cute.py` where QuACK is installed.
Saved are x, h (not with `recompute`) and the plan; h is overwritten by its gradient, unless the
graph is kept for another backward. Every sum has a fixed order: runs repeat bitwise.

Letters: T tokens, K experts per token, E experts, H width, I expert width, P rows.
"""

import importlib
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nmoe_kernels.gemm.padding import pad_widths
from nmoe_kernels.gemm.plan import TILE_ROWS, RowPlan, plan_rows

# What the run of an expert is padded to a multiple of.
ROWS_PER_TILE = {"triton": TILE_ROWS, "cute": 1}


class Products(Protocol):
    """What a backend computes; tensors are contiguous, and widths multiples of 16 bytes."""

    def forward(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        keep_h: bool,
        plan: RowPlan,
    ) -> tuple[Tensor, Tensor]:
        """The output [T, H], and h [P, 2I] for the backward, or nothing."""
        ...

    def gradients(
        self,
        grad_TH: Tensor,
        x_TH: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        h: Tensor,
        wanted: list[bool],
        plan: RowPlan,
        donated: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of x, of the router's weights, of gate_up and of down; empty if not wanted.

        h: empty if it is to be computed again. donated: h may be overwritten.
        """
        ...


def expert_mlp(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    recompute: bool = False,
    assignments: int | None = None,
    backend: str = "triton",
) -> Tensor:
    """The MoE output [T, H] in the dtype of x; arguments as for `nmoe_kernels.layer.moe`.

    A slot whose id is not in [0, E) adds nothing. assignments: a bound of the other slots, where
    they are fewer than T * K. backend: "triton" or "cute".
    """
    width = x_TH.shape[1]
    x_TH, gate_up, down = pad_widths(x_TH, gate_up, down)
    plan = plan_rows(ids_TK, gate_up.shape[0], assignments, ROWS_PER_TILE[backend])
    parts = [part.contiguous() for part in (x_TH, weights_TK.float(), gate_up, down)]
    differentiated = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    y_TH, _ = _forward(*parts, differentiated and not recompute, backend, *plan)
    return y_TH[:, :width]


def _products(backend: str) -> Products:
    return cast(Products, importlib.import_module(f"nmoe_kernels.gemm.{backend}"))


# Operators of torch, so that torch.compile takes them whole and knows the shapes that they give.
@torch.library.custom_op("nmoe_kernels::expert_mlp", mutates_args=())
def _forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    keep_h: bool,
    backend: str,
    token_P: Tensor,
    flat_P: Tensor,
    inverse_TK: Tensor,
    offsets_E1: Tensor,
    ends_E: Tensor,
    tile_expert_N: Tensor,
    tiles: Tensor,
) -> tuple[Tensor, Tensor]:
    plan = RowPlan(token_P, flat_P, inverse_TK, offsets_E1, ends_E, tile_expert_N, tiles)
    return _products(backend).forward(x_TH, weights_TK, gate_up, down, keep_h, plan)


@_forward.register_fake
def _(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    keep_h: bool,
    backend: str,
    *plan: Tensor,
) -> tuple[Tensor, Tensor]:
    h = x_TH.new_empty(plan[0].shape[0], gate_up.shape[1])
    return torch.empty_like(x_TH), h if keep_h else h.new_empty(0)


@torch.library.custom_op("nmoe_kernels::expert_mlp_backward", mutates_args=())
def _backward(
    grad_TH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    h: Tensor,
    wanted: list[bool],
    backend: str,
    token_P: Tensor,
    flat_P: Tensor,
    inverse_TK: Tensor,
    offsets_E1: Tensor,
    ends_E: Tensor,
    tile_expert_N: Tensor,
    tiles: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = RowPlan(token_P, flat_P, inverse_TK, offsets_E1, ends_E, tile_expert_N, tiles)
    return _products(backend).gradients(
        grad_TH, x_TH, weights_TK, gate_up, down, h, wanted, plan, donated=False
    )


@_backward.register_fake
def _(
    grad_TH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    h: Tensor,
    wanted: list[bool],
    backend: str,
    *plan: Tensor,
) -> tuple[Tensor, ...]:
    inputs = zip((x_TH, weights_TK, gate_up, down), wanted, strict=True)
    return tuple(
        torch.empty_like(tensor) if want or tensor is weights_TK else tensor.new_empty(0)
        for tensor, want in inputs
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_TH, weights_TK, gate_up, down, _, ctx.backend, *plan = inputs
    ctx.save_for_backward(x_TH, weights_TK, gate_up, down, output[1], *plan)
    ctx.mark_non_differentiable(output[1])
    # Autograd would otherwise make a gradient of h, as large as h and all zeros, for the backward.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_TH: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_TH is None:
        return (None,) * 13
    x_TH, weights_TK, gate_up, down, h, *plan = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:4])
    grad_TH = grad_TH.to(x_TH.dtype).contiguous()
    saved = (grad_TH, x_TH, weights_TK, gate_up, down, h, wanted)
    if _is_last_use(h):
        grads = _products(ctx.backend).gradients(*saved, RowPlan(*plan), donated=True)
    else:
        grads = _backward(*saved, ctx.backend, *plan)
    given = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *given, *[None] * 9


def _is_last_use(saved: Tensor) -> bool:
    """Whether autograd frees a saved tensor after this backward.

    Not when the graph is kept or differentiated again, nor when a compiler traces with tensors of
    its own.
    """
    if torch.is_grad_enabled() or type(saved) is not Tensor:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


_forward.register_autograd(_differentiate, setup_context=_save)
