"""The launches of the expert MLP's kernels: one function each, from tensors to tensors.

Letters: T tokens, K experts per token, E experts, H width, I expert width, P padded rows; N columns
of an output, C inner dimension.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nmoe_kernels.gemm import tiles as kernels
from nmoe_kernels.gemm.launches import Product, launch_for
from nmoe_kernels.gemm.plan import TILE_ROWS, RowPlan
from nmoe_kernels.tensors import aligned

CLEARED_ROWS = 8


def up(x_TH: Tensor, gate_up: Tensor, plan: RowPlan, keep_h: bool) -> tuple[Tensor, Tensor]:
    """h [P, 2I], or nothing, and a [P, I]."""
    experts, double, width = gate_up.shape
    expert_width, rows = double // 2, plan.token_P.shape[0]
    launch = launch_for("up", width, double, x_TH.device)
    columns = launch.columns // 2
    h, a = x_TH.new_empty(rows if keep_h else 0, double), x_TH.new_empty(rows, expert_width)
    weight = aligned(gate_up).view(experts, 2, expert_width, width)
    h_block = [TILE_ROWS, 1, columns]
    programs = _programs(x_TH)
    kernels.up_kernel[(programs,)](
        x_TH,
        plan.token_P,
        TensorDescriptor.from_tensor(weight, [1, 2, columns, launch.inner]),
        TensorDescriptor.from_tensor(h.view(rows, 2, expert_width), h_block) if keep_h else None,
        TensorDescriptor.from_tensor(a, [TILE_ROWS, columns]),
        plan.tile_expert_N,
        plan.tiles,
        width,
        expert_width,
        KEEP_H=keep_h,
        TILE=TILE_ROWS,
        BN=columns,
        BK=launch.inner,
        GROUP=launch.group,
        PROGRAMS=programs,
        EVEN=width % launch.inner == 0,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return h, a


def rows_times_weight(
    product: Product, rows: Tensor, weight: Tensor, out: Tensor, plan: RowPlan
) -> None:
    """out [P, N] = rows [P, C] W^T for weight [E, N, C] (down), or rows W for weight [E, C, N]."""
    launch = launch_for(product, rows.shape[1], out.shape[1], rows.device)
    transposed = product != "down"
    columns, inner = launch.columns, launch.inner
    block = [1, inner, columns] if transposed else [1, columns, inner]
    programs = _programs(rows)
    kernels.rows_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows, [TILE_ROWS, inner]),
        TensorDescriptor.from_tensor(aligned(weight), block),
        TensorDescriptor.from_tensor(out, [TILE_ROWS, columns // 2 if launch.halves else columns]),
        plan.tile_expert_N,
        plan.tiles,
        rows.shape[1],
        out.shape[1],
        TRANSPOSED=transposed,
        TILE=TILE_ROWS,
        BN=columns,
        BK=inner,
        GROUP=launch.group,
        PROGRAMS=programs,
        HALVES=launch.halves,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def weight_grad(
    product: Product, left: Tensor, right: Tensor, plan: RowPlan, weight: Tensor
) -> Tensor:
    """The gradient of a weight [E, out, in]: left^T right over each expert's rows."""
    grad = torch.empty_like(weight)
    launch = launch_for(product, left.shape[1], right.shape[1], weight.device)
    programs = _programs(weight)
    kernels.weight_grad_kernel[(programs,)](
        TensorDescriptor.from_tensor(left, [launch.inner, TILE_ROWS]),
        TensorDescriptor.from_tensor(right, [launch.inner, launch.columns]),
        TensorDescriptor.from_tensor(grad, [1, TILE_ROWS, launch.columns]),
        plan.offsets_E1,
        plan.ends_E,
        left.shape[1],
        right.shape[1],
        weight.shape[0],
        BM=TILE_ROWS,
        BN=launch.columns,
        BK=launch.inner,
        GROUP=launch.group,
        PROGRAMS=programs,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return grad


def swiglu_backward(
    h: Tensor, grad_a: Tensor, weights_TK: Tensor, plan: RowPlan, grad_h: Tensor
) -> Tensor:
    """The gradient of the router's weights [T, K]; writes that of h, and a * weight over grad_a.

    grad_h [P, 2I] may be h itself.
    """
    # An assignment without a row has no gradient.
    grad_weights = torch.zeros_like(weights_TK)
    kernels.swiglu_backward_kernel[(h.shape[0],)](
        h,
        grad_a,
        weights_TK,
        plan.flat_P,
        grad_h,
        grad_weights,
        plan.tiles,
        grad_a.shape[1],
        TILE=TILE_ROWS,
        BLOCK=triton.next_power_of_2(grad_a.shape[1]),
        num_warps=4,
    )
    return grad_weights


def sum_slots(rows: Tensor, plan: RowPlan, weights_TK: Tensor | None = None) -> Tensor:
    """Each token's K rows summed, weighted or not; [T, H]."""
    tokens, slots = plan.inverse_TK.shape
    out = rows.new_empty(tokens, rows.shape[1])
    block = min(2048, triton.next_power_of_2(rows.shape[1]))
    if tokens:
        kernels.sum_slots_kernel[(tokens, triton.cdiv(rows.shape[1], block))](
            rows,
            plan.inverse_TK,
            rows if weights_TK is None else weights_TK,
            out,
            rows.shape[1],
            SLOTS=slots,
            WEIGHTED=weights_TK is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


def scatter(x_TH: Tensor, plan: RowPlan, out: Tensor) -> None:
    """Writes x by rows, [P, H]; zeros in padding rows."""
    tokens, width = x_TH.shape
    experts, slots = plan.ends_E.shape[0], plan.inverse_TK.shape[1]
    block = min(2048, triton.next_power_of_2(width))
    # Programs past the tokens each clear a few rows of an expert's last tile.
    programs = tokens + experts * (TILE_ROWS // CLEARED_ROWS)
    kernels.scatter_kernel[(programs, triton.cdiv(width, block))](
        x_TH,
        plan.inverse_TK,
        plan.offsets_E1,
        plan.ends_E,
        out,
        tokens,
        width,
        SLOTS=slots,
        TILE=TILE_ROWS,
        CLEARED=CLEARED_ROWS,
        BLOCK=block,
        num_warps=4,
    )


def _programs(tensor: Tensor) -> int:
    """One persistent program for each multiprocessor; a few where Triton's interpreter runs."""
    if tensor.device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
