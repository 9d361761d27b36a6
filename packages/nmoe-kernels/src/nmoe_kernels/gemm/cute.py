"""The products of the expert MLP on QuACK's CuTe DSL kernels, on Hopper.

Forward: one product gathers tokens, multiplies gate and up at once and applies SwiGLU; one
multiplies by `down`; a token's rows are summed in fp32, slot after slot. Backward: one product
gathers the gradient of the output, multiplies by `down` and goes on to the gradient of h, to the
weighted activations and to that of the router's weights, so that the gradient of a is never stored;
the gradients of the weights gather the rows of tokens that they sum over. Rows are not padded.

QuACK keeps a row's gate and up numbers in turns, and so lies h; the weights lie as everywhere else.
Its functions take products as [E, out, in], whatever the strides.

Letters: T tokens, K experts per token, E experts, H width, I expert width, P rows.
"""

from dataclasses import dataclass, replace

import torch
import triton
from quack.gemm import gemm
from quack.gemm_act import gemm_gated
from quack.gemm_dact import gemm_dgated
from torch import Tensor

from nmoe_kernels.gemm import products, tiles
from nmoe_kernels.gemm.plan import RowPlan
from nmoe_kernels.tensors import aligned

ASSIGNMENTS = 1024
"""That a program of the kernels between tokens and rows takes."""


@dataclass(frozen=True)
class Launch:
    """rows and columns: of an output tile. cluster: thread blocks along the rows and columns that
    share what they load. pingpong: two groups of warps take turns, one multiplies while the other
    stores. dynamic: blocks take the next tile when they are free.
    """

    rows: int = 128
    columns: int = 192
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = True
    dynamic: bool = False


GATHERING = Launch(columns=256, pingpong=False)
PAIRED = Launch(cluster=(1, 2))
# Measured on an H200 at the sizes of five layers (infra/bench/results/cute-launches-h200.json).
LAUNCHES = {
    "up": (GATHERING,),
    "down": (PAIRED, Launch()),
    "grad_h": (replace(GATHERING, dynamic=True),),
    "grad_x": (
        replace(PAIRED, dynamic=True),
        Launch(columns=256, cluster=(1, 2), pingpong=False, dynamic=True),
    ),
    "grad_down": (replace(GATHERING, dynamic=True),),
    "grad_gate_up": (
        Launch(rows=256, columns=160, pingpong=False),
        replace(GATHERING, dynamic=True),
    ),
}
"""How each product is launched: by the first whose tiles fit its columns, or else by the last."""
OVERHANG = 1.1
"""Tiles fit that cover at most so many times the columns there are."""


def forward(
    x_TH: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor, keep_h: bool, plan: RowPlan
) -> tuple[Tensor, Tensor]:
    """See `fused.Products`. h holds a row's gate and up numbers in turns."""
    h, a = _up(x_TH, gate_up, plan, keep_h)
    return products.sum_slots(_down(a, aligned(down), plan), plan, weights_TK), h


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
    if not plan.token_P.shape[0]:
        zeros = torch.zeros_like
        return zeros(x_TH), zeros(weights_TK), zeros(gate_up), zeros(down)
    wants_x, _, wants_gate_up, wants_down = wanted
    grad_x, grad_gate_up, grad_down = (x_TH.new_empty(0) for _ in range(3))
    grad_TH, x_TH, gate_up, down = map(aligned, (grad_TH, x_TH, gate_up, down))
    if h.numel() == 0:
        (h, _), donated = _up(x_TH, gate_up, plan, keep_h=True), True
    grad_h = h if donated else torch.empty_like(h)
    weighted_a = x_TH.new_empty(h.shape[0], down.shape[2])
    grad_weights = _grad_h(grad_TH, weights_TK, down, h, grad_h, weighted_a, plan)
    if wants_down:
        grad_down = torch.empty_like(down)
        _weight_grad("grad_down", grad_TH, weighted_a, grad_down, plan)
    del weighted_a
    if wants_gate_up:
        grad_gate_up = torch.empty_like(gate_up)
        _weight_grad("grad_gate_up", x_TH, grad_h, grad_gate_up.mT, plan)
    if wants_x:
        grad_x = products.sum_slots(_grad_x(grad_h, gate_up, plan), plan)
    return grad_x, grad_weights, grad_gate_up, grad_down


def _up(x_TH: Tensor, gate_up: Tensor, plan: RowPlan, keep_h: bool) -> tuple[Tensor, Tensor]:
    """h [P, 2I], or nothing, and a [P, I]."""
    rows, double = plan.token_P.shape[0], gate_up.shape[1]
    h, a = x_TH.new_empty(rows if keep_h else 0, double), x_TH.new_empty(rows, double // 2)
    if rows:
        semaphore, *tile = _tile(launch_for("up", double), a)
        gemm_gated(
            aligned(x_TH),
            aligned(gate_up),
            h if keep_h else None,
            None,
            a,
            semaphore,
            "swiglu",
            *tile,
            cu_seqlens_m=plan.offsets_E1,
            A_idx=plan.token_P,
            concat_layout=("B",),
        )
    return h, a


def _down(a: Tensor, down: Tensor, plan: RowPlan) -> Tensor:
    """The rows of the output [P, H], without their weights."""
    rows = a.new_empty(a.shape[0], down.shape[1])
    if rows.shape[0]:
        gemm(
            a,
            down,
            rows,
            None,
            *_tile(launch_for("down", down.shape[1]), a),
            cu_seqlens_m=plan.offsets_E1,
        )
    return rows


def _grad_x(grad_h: Tensor, gate_up: Tensor, plan: RowPlan) -> Tensor:
    """The gradient of the rows of x [P, H]."""
    rows = grad_h.new_empty(grad_h.shape[0], gate_up.shape[2])
    gemm(
        grad_h,
        gate_up.mT,
        rows,
        None,
        *_tile(launch_for("grad_x", gate_up.shape[2]), grad_h),
        cu_seqlens_m=plan.offsets_E1,
        concat_layout=("B",),
    )
    return rows


def _grad_h(
    grad_TH: Tensor,
    weights_TK: Tensor,
    down: Tensor,
    h: Tensor,
    grad_h: Tensor,
    weighted_a: Tensor,
    plan: RowPlan,
) -> Tensor:
    """The gradient of the router's weights [T, K]; writes that of h, and a times the weight.

    grad_h [P, 2I] may be h itself: a tile reads what it then writes.
    """
    weight_P, grad_weights = weights_TK.new_empty(h.shape[0]), torch.empty_like(weights_TK)
    assignments, inverse_TK = weights_TK.numel(), plan.inverse_TK
    grid, sizes = (triton.cdiv(assignments, ASSIGNMENTS),), {"BLOCK": ASSIGNMENTS}
    tiles.spread_kernel[grid](weights_TK, inverse_TK, weight_P, assignments, **sizes)
    parts = _swiglu_gradients(grad_TH, down, h, grad_h, weighted_a, weight_P, plan)
    tiles.gather_sums_kernel[grid](
        parts, inverse_TK, grad_weights, assignments, PARTS=parts.shape[1], **sizes
    )
    return grad_weights


def _swiglu_gradients(
    grad_TH: Tensor,
    down: Tensor,
    h: Tensor,
    grad_h: Tensor,
    weighted_a: Tensor,
    weight_P: Tensor,
    plan: RowPlan,
) -> Tensor:
    """Of <a, grad_a>, the sums over the columns of each tile [P, tiles]; writes as `_grad_h`."""
    rows, expert_width = weighted_a.shape
    launch = launch_for("grad_h", expert_width)
    parts = weight_P.new_empty(rows, triton.cdiv(expert_width, launch.columns))
    semaphore, *tile = _tile(launch, h)
    gemm_dgated(
        grad_TH,
        down.mT,
        grad_h,
        h,
        weighted_a,
        semaphore,
        "swiglu",
        *tile,
        colvec_scale=weight_P,
        colvec_reduce=parts,
        cu_seqlens_m=plan.offsets_E1,
        A_idx=plan.token_P,
    )
    return parts


def _weight_grad(
    product: str, x_TH: Tensor, rows_PN: Tensor, out_EHN: Tensor, plan: RowPlan
) -> None:
    """out[e] = x[token]^T rows over the rows of expert e; an expert without rows gets zeros."""
    gemm(
        x_TH.t(),
        rows_PN.t(),
        out_EHN,
        None,
        *_tile(launch_for(product, rows_PN.shape[1]), x_TH),
        cu_seqlens_k=plan.offsets_E1,
        A_idx=plan.token_P,
        concat_layout=("out",) if product == "grad_gate_up" else None,
    )


def launch_for(product: str, columns: int) -> Launch:
    """The launch of a product with so many columns in its result."""
    *preferred, last = LAUNCHES[product]
    for launch in preferred:
        step = launch.columns * launch.cluster[1]
        if triton.cdiv(columns, step) * step <= OVERHANG * columns:
            return launch
    return last


def _tile(
    launch: Launch, like: Tensor
) -> tuple[Tensor | None, int, int, int, int, bool, bool, bool]:
    """The arguments of a product that say how it is launched; the counter of tiles comes first."""
    counter = torch.zeros(1, dtype=torch.int32, device=like.device) if launch.dynamic else None
    # True: the blocks stay, and go from tile to tile.
    size = (launch.rows, launch.columns, *launch.cluster)
    return counter, *size, launch.pingpong, True, launch.dynamic
