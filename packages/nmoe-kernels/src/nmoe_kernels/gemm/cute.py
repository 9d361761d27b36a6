"""The products of the expert MLP on QuACK's CuTe DSL kernels, on Hopper.

Forward: one product gathers tokens, multiplies gate and up at once and applies SwiGLU; one
multiplies by `down`; a token's rows are summed in fp32, slot after slot. Backward: one product
gathers the gradient of the output, multiplies by `down` and goes on to the gradient of h, to the
weighted activations and to that of the router's weights, so that the gradient of a is never stored;
the gradients of the weights gather the rows of tokens that they sum over. Rows are not padded.

QuACK keeps a row's gate and up numbers in turns, and so lies h; the weights lie as everywhere else.
Its functions take products as [E, out, in], whatever the strides. Its kernels start before the one
ahead of them has ended, and read offsets and counters of tiles at once: so those are written by
kernels before that one.

Letters: T tokens, K experts per token, E experts, H width, I expert width, P rows.
"""

import os
from dataclasses import dataclass, replace

import quack.cache_utils
import torch
import triton
from quack.gemm import gemm
from quack.gemm_act import gemm_gated
from quack.gemm_dact import gemm_dgated
from torch import Tensor

from nmoe_kernels.gemm import products, tiles
from nmoe_kernels.gemm.launches import cache_folder
from nmoe_kernels.gemm.plan import RowPlan
from nmoe_kernels.tensors import aligned

if not os.environ.get("QUACK_CACHE_DIR"):
    # What is compiled is loaded again by later processes: from a folder that is the user's own.
    quack.cache_utils.CACHE_DIR = str(cache_folder() / "quack")

ASSIGNMENTS = 1024
"""That a program of the kernels between tokens and rows takes."""


@dataclass(frozen=True)
class CuteLaunch:
    """rows and columns: of an output tile. cluster: thread blocks along the rows and columns that
    share what they load. pingpong: two groups of warps take turns, one multiplies while the other
    stores. dynamic: blocks take the next tile when they are free.
    """

    rows: int = 128
    columns: int = 192
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = True
    dynamic: bool = False


GATHERING = CuteLaunch(columns=256, pingpong=False)
PAIRED = CuteLaunch(cluster=(1, 2))
# One rule for the sizes of the five layers that were measured on an H200, within 8 % of the fastest
# at each (infra/bench/results/cute-launches-h200.json).
LAUNCHES = {
    "up": (GATHERING,),
    "down": (PAIRED, CuteLaunch()),
    "grad_h": (replace(GATHERING, dynamic=True),),
    "grad_x": (
        replace(PAIRED, dynamic=True),
        CuteLaunch(columns=256, cluster=(1, 2), pingpong=False, dynamic=True),
    ),
    "grad_down": (replace(GATHERING, dynamic=True),),
    "grad_gate_up": (
        CuteLaunch(rows=256, columns=160, pingpong=False),
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
    # After the plan of rows, whose offsets the first product reads.
    counters = _counters(x_TH)
    h, a = _up(x_TH, gate_up, plan, keep_h, counters)
    return products.sum_slots(_down(a, aligned(down), plan, counters), plan, weights_TK), h


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
    grad_x, grad_gate_up, grad_down = (
        torch.zeros_like(of) if want and not plan.token_P.shape[0] else of.new_empty(0)
        for of, want in ((x_TH, wants_x), (gate_up, wants_gate_up), (down, wants_down))
    )
    if not plan.token_P.shape[0]:
        return grad_x, torch.zeros_like(weights_TK), grad_gate_up, grad_down
    grad_TH, x_TH, gate_up, down = map(aligned, (grad_TH, x_TH, gate_up, down))
    # Before the first kernel that a product follows.
    counters = _counters(x_TH)
    if h.numel() == 0:
        (h, _), donated = _up(x_TH, gate_up, plan, True, counters), True
    grad_h = h if donated else torch.empty_like(h)
    weighted_a = x_TH.new_empty(h.shape[0], down.shape[2])
    grad_weights = _grad_h(grad_TH, weights_TK, down, h, grad_h, weighted_a, plan, counters)
    if wants_down:
        grad_down = torch.empty_like(down)
        _weight_grad("grad_down", grad_TH, weighted_a, grad_down, plan, counters)
    del weighted_a
    if wants_gate_up:
        grad_gate_up = torch.empty_like(gate_up)
        _weight_grad("grad_gate_up", x_TH, grad_h, grad_gate_up.mT, plan, counters)
    if wants_x:
        grad_x = products.sum_slots(_grad_x(grad_h, gate_up, plan, counters), plan)
    return grad_x, grad_weights, grad_gate_up, grad_down


def _counters(like: Tensor) -> Tensor:
    """A zero for each product: its blocks count in it the tiles that they took."""
    return torch.zeros(len(LAUNCHES), dtype=torch.int32, device=like.device)


def _up(
    x_TH: Tensor, gate_up: Tensor, plan: RowPlan, keep_h: bool, counters: Tensor
) -> tuple[Tensor, Tensor]:
    """h [P, 2I], or nothing, and a [P, I]."""
    rows, double = plan.token_P.shape[0], gate_up.shape[1]
    h, a = x_TH.new_empty(rows if keep_h else 0, double), x_TH.new_empty(rows, double // 2)
    if rows:
        counter, *tile = _launched("up", double, counters)
        gemm_gated(
            aligned(x_TH),
            aligned(gate_up),
            h if keep_h else None,
            None,
            a,
            counter,
            "swiglu",
            *tile,
            cu_seqlens_m=plan.offsets_E1,
            A_idx=plan.token_P,
            concat_layout=("B",),
        )
    return h, a


def _down(a: Tensor, down: Tensor, plan: RowPlan, counters: Tensor) -> Tensor:
    """The rows of the output [P, H], without their weights."""
    rows = a.new_empty(a.shape[0], down.shape[1])
    if rows.shape[0]:
        gemm(
            a,
            down,
            rows,
            None,
            *_launched("down", down.shape[1], counters),
            cu_seqlens_m=plan.offsets_E1,
        )
    return rows


def _grad_x(grad_h: Tensor, gate_up: Tensor, plan: RowPlan, counters: Tensor) -> Tensor:
    """The gradient of the rows of x [P, H]."""
    rows = grad_h.new_empty(grad_h.shape[0], gate_up.shape[2])
    gemm(
        grad_h,
        gate_up.mT,
        rows,
        None,
        *_launched("grad_x", gate_up.shape[2], counters),
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
    counters: Tensor,
) -> Tensor:
    """The gradient of the router's weights [T, K]; writes that of h, and a times the weight.

    grad_h [P, 2I] may be h itself: a tile reads what it then writes.
    """
    weight_P, grad_weights = weights_TK.new_empty(h.shape[0]), torch.empty_like(weights_TK)
    assignments, inverse_TK = weights_TK.numel(), plan.inverse_TK
    grid, sizes = (triton.cdiv(assignments, ASSIGNMENTS),), {"BLOCK": ASSIGNMENTS}
    tiles.spread_kernel[grid](weights_TK, inverse_TK, weight_P, assignments, **sizes)
    parts = _swiglu_gradients(grad_TH, down, h, grad_h, weighted_a, weight_P, plan, counters)
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
    counters: Tensor,
) -> Tensor:
    """Of <a, grad_a>, the sums over the columns of each tile [P, tiles]; writes as `_grad_h`."""
    rows, expert_width = weighted_a.shape
    columns = cute_launch("grad_h", expert_width).columns
    parts = weight_P.new_empty(rows, triton.cdiv(expert_width, columns))
    counter, *tile = _launched("grad_h", expert_width, counters)
    gemm_dgated(
        grad_TH,
        down.mT,
        grad_h,
        h,
        weighted_a,
        counter,
        "swiglu",
        *tile,
        colvec_scale=weight_P,
        colvec_reduce=parts,
        cu_seqlens_m=plan.offsets_E1,
        A_idx=plan.token_P,
    )
    return parts


def _weight_grad(
    product: str,
    x_TH: Tensor,
    rows_PN: Tensor,
    out_EHN: Tensor,
    plan: RowPlan,
    counters: Tensor,
) -> None:
    """out[e] = x[token]^T rows over the rows of expert e; an expert without rows gets zeros."""
    gemm(
        x_TH.t(),
        rows_PN.t(),
        out_EHN,
        None,
        *_launched(product, rows_PN.shape[1], counters),
        cu_seqlens_k=plan.offsets_E1,
        A_idx=plan.token_P,
        concat_layout=("out",) if product == "grad_gate_up" else None,
    )


def cute_launch(product: str, columns: int) -> CuteLaunch:
    """The launch of a product with so many columns in its result."""
    *preferred, last = LAUNCHES[product]
    for launch in preferred:
        step = launch.columns * launch.cluster[1]
        if triton.cdiv(columns, step) * step <= OVERHANG * columns:
            return launch
    return last


def _launched(
    product: str, columns: int, counters: Tensor
) -> tuple[Tensor | None, int, int, int, int, bool, bool, bool]:
    """The arguments of a product that say how it is launched; its counter of tiles comes first."""
    launch = cute_launch(product, columns)
    counter = counters[list(LAUNCHES).index(product)] if launch.dynamic else None
    # True: the blocks stay, and go from tile to tile.
    size = (launch.rows, launch.columns, *launch.cluster)
    return counter, *size, launch.pingpong, True, launch.dynamic
