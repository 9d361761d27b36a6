"""The products of the expert MLP on our Triton kernels.

Forward: `up` gathers tokens into tiles, multiplies gate and up at once and applies SwiGLU; `down`
multiplies the sorted rows; a token's rows are summed in fp32, slot after slot. Backward: the
gradient of the output is scattered to its rows once, for the gradient of a (whose product with a,
summed over the row, is that of the router's weight) and for that of `down`; the same buffer then
holds the rows of x for the gradient of `gate_up`, and the rows of the gradient of x.

Letters: T tokens, K experts per token, H width, I expert width, P padded rows.
"""

import torch
from torch import Tensor

from nmoe_kernels.gemm import products
from nmoe_kernels.gemm.plan import RowPlan


def forward(
    x_TH: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor, keep_h: bool, plan: RowPlan
) -> tuple[Tensor, Tensor]:
    """See `fused.Products`. h holds a row's gates, then its ups."""
    h, a = products.up(x_TH, gate_up, plan, keep_h)
    y = x_TH.new_empty(a.shape[0], x_TH.shape[1])
    products.rows_times_weight("down", a, down, y, plan)
    return products.sum_slots(y, plan, weights_TK), h


def gradients(
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
    """See `fused.Products`."""
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
