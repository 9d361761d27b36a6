"""The expert MLP on `torch.nn.functional.grouped_mm`, with its backward written out.

Forward: gather rows by expert, h = x W_gate_up^T, a = silu(h_gate) * h_up, y = a W_down^T, and for
each token the weighted sum of its K rows in fp32, slot after slot. Backward: dA = dY W_down^T on
unweighted rows, whose product with a, summed over the row, is the gradient of the router's weight
(so y is not kept); the weight then scales a and dA. Saved are x, h (not with `recompute`) and
indices. Rows past the last offset hold whatever was in memory, and are masked wherever rows meet
tokens.

Letters: T tokens, K experts per token, E experts, H width, I expert width, M = T*K rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmoe_kernels.gemm.padding import pad_widths
from nmoe_kernels.grouping import Grouping


def expert_mlp(
    x_TH: Tensor,
    grouping: Grouping,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    recompute: bool = False,
) -> Tensor:
    """The MoE output [T, H] in the dtype of x; arguments as for `nmoe_kernels.layer.moe`."""
    width = x_TH.shape[1]
    x_TH, gate_up, down = pad_widths(x_TH, gate_up, down)
    weights = (weights_TK.float(), gate_up.contiguous(), down.contiguous())
    y_TH: Tensor = _ExpertMLP.apply(x_TH, *weights, recompute, *grouping)
    return y_TH[:, :width]


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        recompute: bool,
        *index: Tensor,
    ) -> Tensor:
        grouping = Grouping(*index)
        ends = grouping.offsets_E1[1:]
        h = F.grouped_mm(x_TH[grouping.token_M], gate_up.mT, offs=ends)
        y = F.grouped_mm(_swiglu_parts(h)[1], down.mT, offs=ends)
        ctx.save_for_backward(x_TH, weights_TK, gate_up, down, None if recompute else h, *index)
        return _sum_slots(y, grouping, weights_TK).to(x_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, gate_up, down, h, *index = ctx.saved_tensors
        grouping = Grouping(*index)
        token_M, ends, dtype = grouping.token_M, grouping.offsets_E1[1:], x_TH.dtype
        wants_x, wants_weights, wants_gate_up, wants_down = ctx.needs_input_grad[:4]
        grad_x = grad_weights = grad_gate_up = grad_down = None

        x_rows = x_TH[token_M]
        if h is None:
            h = F.grouped_mm(x_rows, gate_up.mT, offs=ends)
        grad_rows = grad_TH.to(dtype)[token_M]
        grad_a = F.grouped_mm(grad_rows, down, offs=ends)
        silu, a = _swiglu_parts(h)
        weight_M1 = weights_TK.reshape(-1)[grouping.order_M].unsqueeze(-1)
        if wants_weights:
            by_row = (a * grad_a).sum(-1, dtype=torch.float32)[grouping.inverse_TK]
            grad_weights = torch.where(grouping.kept_TK, by_row, 0.0).to(weights_TK.dtype)
        if wants_down:
            grad_down = F.grouped_mm(grad_rows.t(), a.mul_(weight_M1), offs=ends)
            _clear_empty(grad_down, grouping)
        grad_h = _swiglu_backward(h, silu, grad_a.mul_(weight_M1))
        if wants_gate_up:
            grad_gate_up = F.grouped_mm(grad_h.t(), x_rows, offs=ends)
            _clear_empty(grad_gate_up, grouping)
        if wants_x:
            grad_x_rows = F.grouped_mm(grad_h, gate_up, offs=ends)
            grad_x = _sum_slots(grad_x_rows, grouping).to(dtype)
        return grad_x, grad_weights, grad_gate_up, grad_down, *[None] * 5


def _swiglu_parts(h: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, dim=-1)
    silu = F.silu(gate)
    return silu, silu * up


def _swiglu_backward(h: Tensor, silu: Tensor, grad_a: Tensor) -> Tensor:
    """The gradient of h. Overwrites `silu` and `grad_a`: fresh memory is slow on a CPU."""
    gate, up = h.chunk(2, dim=-1)
    grad_h = torch.empty_like(h)
    grad_gate, grad_up = grad_h.chunk(2, dim=-1)
    grad_up.copy_(silu.mul_(grad_a))
    grad_gate.copy_(torch.ops.aten.silu_backward(grad_a.mul_(up), gate))
    return grad_h


def _sum_slots(rows_MH: Tensor, grouping: Grouping, weights_TK: Tensor | None = None) -> Tensor:
    """Sums each token's K rows in fp32, slot 0 first, weighted or not, leaving out dropped ones."""
    kept_TK = grouping.kept_TK
    weights_TK = kept_TK.float() if weights_TK is None else torch.where(kept_TK, weights_TK, 0.0)
    # A dropped slot reads a row of its own token with weight 0: its own row may hold NaN.
    home_T1 = grouping.inverse_TK.gather(1, kept_TK.int().argmax(1, keepdim=True))
    row_TK = torch.where(kept_TK, grouping.inverse_TK, home_T1)
    total = rows_MH.new_zeros(row_TK.shape[0], rows_MH.shape[1], dtype=torch.float32)
    for k in range(row_TK.shape[1]):
        total.addcmul_(rows_MH[row_TK[:, k]].float(), weights_TK[:, k, None])
    return torch.where(kept_TK.any(1, keepdim=True), total, 0.0)


def _clear_empty(grad: Tensor, grouping: Grouping) -> None:
    """Zeroes the gradient of experts without a row: grouped_mm has left garbage there."""
    grad.masked_fill_((grouping.offsets_E1.diff() == 0)[:, None, None], 0.0)
