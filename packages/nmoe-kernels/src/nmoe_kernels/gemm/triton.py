"""The expert MLP on Triton kernels, for 16-bit floats on CUDA.

Forward: `up` gathers tokens into tiles, multiplies gate and up at once and applies SwiGLU; `down`
multiplies the sorted rows; a token's rows are summed in fp32, slot after slot. Backward: the
gradient of the output is scattered to its rows once, for the gradient of a (whose product with a,
summed over the row, is that of the router's weight) and for that of `down`; the same buffer then
holds the rows of x for the gradient of `gate_up`, and the rows of the gradient of x. Saved are x, h
(not with `recompute`) and the plan of rows; h is overwritten by its gradient, unless the graph is
kept for another backward. Every sum has a fixed order: runs repeat bitwise.

Letters: T tokens, K experts per token, E experts, H width, I expert width, P padded rows.
"""

from typing import Any

import torch
from torch import Tensor

from nmoe_kernels.gemm import products
from nmoe_kernels.gemm.padding import pad_widths
from nmoe_kernels.gemm.plan import RowPlan, plan_rows


def expert_mlp(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    recompute: bool = False,
    assignments: int | None = None,
) -> Tensor:
    """The MoE output [T, H] in the dtype of x; arguments as for `nmoe_kernels.layer.moe`.

    A slot whose id is not in [0, E) adds nothing. assignments: a bound of the other slots, where
    they are fewer than T * K.
    """
    width = x_TH.shape[1]
    x_TH, gate_up, down = pad_widths(x_TH, gate_up, down)
    plan = plan_rows(ids_TK, gate_up.shape[0], assignments)
    parts = [part.contiguous() for part in (x_TH, weights_TK.float(), gate_up, down)]
    differentiated = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    y_TH, _ = _forward(*parts, differentiated and not recompute, *plan)
    return y_TH[:, :width]


# Operators of torch, so that torch.compile takes them whole and knows the shapes that they give.
@torch.library.custom_op("nmoe_kernels::expert_mlp", mutates_args=())
def _forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    keep_h: bool,
    token_P: Tensor,
    flat_P: Tensor,
    inverse_TK: Tensor,
    offsets_E1: Tensor,
    ends_E: Tensor,
    tile_expert_N: Tensor,
    tiles: Tensor,
) -> tuple[Tensor, Tensor]:
    """The output [T, H], and h [P, 2I] for the backward, or nothing."""
    plan = RowPlan(token_P, flat_P, inverse_TK, offsets_E1, ends_E, tile_expert_N, tiles)
    h, a = products.up(x_TH, gate_up, plan, keep_h)
    y = x_TH.new_empty(a.shape[0], x_TH.shape[1])
    products.rows_times_weight("down", a, down, y, plan)
    return products.sum_slots(y, plan, weights_TK), h


@_forward.register_fake
def _(
    x_TH: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor, keep_h: bool, *plan: Tensor
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
    token_P: Tensor,
    flat_P: Tensor,
    inverse_TK: Tensor,
    offsets_E1: Tensor,
    ends_E: Tensor,
    tile_expert_N: Tensor,
    tiles: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = RowPlan(token_P, flat_P, inverse_TK, offsets_E1, ends_E, tile_expert_N, tiles)
    return _gradients(grad_TH, x_TH, weights_TK, gate_up, down, h, wanted, plan, donated=False)


def _gradients(
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

    donated: h may be overwritten.
    """
    wants_x, _, wants_gate_up, wants_down = wanted
    grad_x, grad_gate_up, grad_down = (x_TH.new_empty(0) for _ in range(3))
    if h.numel() == 0:
        (h, _), donated = products.up(x_TH, gate_up, plan, keep_h=True), True
    rows = x_TH.new_empty(h.shape[0], x_TH.shape[1])
    products.scatter(grad_TH, plan, rows)
    grad_a = x_TH.new_empty(h.shape[0], down.shape[2])
    products.rows_times_weight("grad_a", rows, down, grad_a, plan)
    grad_h = h if donated else torch.empty_like(h)
    grad_weights = products.swiglu_backward(h, grad_a, weights_TK, plan, grad_h)
    if wants_down:
        # grad_a now holds the weighted activations.
        grad_down = products.weight_grad("grad_down", rows, grad_a, plan, down)
    del grad_a
    if wants_gate_up:
        products.scatter(x_TH, plan, rows)
        grad_gate_up = products.weight_grad("grad_gate_up", grad_h, rows, plan, gate_up)
    if wants_x:
        products.rows_times_weight("grad_x", grad_h, gate_up, rows, plan)
        grad_x = products.sum_slots(rows, plan)
    return grad_x, grad_weights, grad_gate_up, grad_down


@_backward.register_fake
def _(
    grad_TH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    h: Tensor,
    wanted: list[bool],
    *plan: Tensor,
) -> tuple[Tensor, ...]:
    inputs = zip((x_TH, weights_TK, gate_up, down), wanted, strict=True)
    return tuple(
        torch.empty_like(tensor) if want or tensor is weights_TK else tensor.new_empty(0)
        for tensor, want in inputs
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_TH, weights_TK, gate_up, down, _, *plan = inputs
    ctx.save_for_backward(x_TH, weights_TK, gate_up, down, output[1], *plan)
    ctx.mark_non_differentiable(output[1])
    # Autograd would otherwise make a gradient of h, as large as h and all zeros, for the backward.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_TH: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_TH is None:
        return (None,) * 12
    x_TH, weights_TK, gate_up, down, h, *plan = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:4])
    grad_TH = grad_TH.to(x_TH.dtype).contiguous()
    saved = (grad_TH, x_TH, weights_TK, gate_up, down, h, wanted)
    if _is_last_use(h):
        grads = _gradients(*saved, RowPlan(*plan), donated=True)
    else:
        grads = _backward(*saved, *plan)
    given = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *given, *[None] * 8


def _is_last_use(saved: Tensor) -> bool:
    """Whether autograd frees a saved tensor after this backward.

    Not when the graph is kept or differentiated again, nor when a compiler traces with tensors of
    its own.
    """
    if torch.is_grad_enabled() or type(saved) is not Tensor:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


_forward.register_autograd(_differentiate, setup_context=_save)
