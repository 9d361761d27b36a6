"""The expert MLP on Triton kernels, for 16-bit floats on CUDA.

Forward: `up` gathers tokens into tiles, multiplies gate and up at once and applies SwiGLU; `down`
multiplies the sorted rows; a token's rows are summed in fp32, slot after slot. Backward: the
gradient of the output is gathered once, for the gradient of a (whose product with a, summed over
the row, is that of the router's weight) and for that of `down`; the same buffer then holds the
gathered x for the gradient of `gate_up`, and the rows of the gradient of x. Saved are x, h (not
with `recompute`) and the plan of rows. Every sum has a fixed order: runs repeat bitwise.

Letters: T tokens, K experts per token, E experts, H width, I expert width, P padded rows.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nmoe_kernels.gemm import tiles as kernels
from nmoe_kernels.gemm.padding import pad_widths
from nmoe_kernels.gemm.plan import TILE_ROWS, RowPlan, plan_rows

# The fastest of those measured on an H200: eight warps hold a 128 x 256 tile of fp32 sums.
COLUMNS, INNER, STAGES, WARPS, GROUP = 256, 64, 3, 8, 8


def expert_mlp(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    recompute: bool = False,
) -> Tensor:
    """The MoE output [T, H] in the dtype of x; arguments as for `nmoe_kernels.layer.moe`.

    A slot whose id is not in [0, E) adds nothing.
    """
    width = x_TH.shape[1]
    x_TH, gate_up, down = pad_widths(x_TH, gate_up, down)
    plan = plan_rows(ids_TK, gate_up.shape[0])
    parts = (x_TH.contiguous(), weights_TK.float(), gate_up.contiguous(), down.contiguous())
    y_TH, _ = _forward(*parts, not recompute, *plan)
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
    tile_expert_N: Tensor,
    tiles: Tensor,
) -> tuple[Tensor, Tensor]:
    """The output [T, H], and h [P, 2I] for the backward, or nothing."""
    plan = RowPlan(token_P, flat_P, inverse_TK, offsets_E1, tile_expert_N, tiles)
    h, a = _up(x_TH, gate_up, plan)
    y = x_TH.new_empty(a.shape[0], x_TH.shape[1])
    _rows_times_weight(a, down, y, plan, transposed=False)
    return _sum_slots(y, plan, weights_TK), h if keep_h else h.new_empty(0)


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
    tile_expert_N: Tensor,
    tiles: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of the router's weights, of gate_up and of down; empty if not wanted."""
    plan = RowPlan(token_P, flat_P, inverse_TK, offsets_E1, tile_expert_N, tiles)
    wants_x, _, wants_gate_up, wants_down = wanted
    grad_x, grad_gate_up, grad_down = (x_TH.new_empty(0) for _ in range(3))
    if h.numel() == 0:
        h, _ = _up(x_TH, gate_up, plan)
    rows = _gather(grad_TH, plan)
    grad_a = x_TH.new_empty(h.shape[0], down.shape[2])
    _rows_times_weight(rows, down, grad_a, plan, transposed=True)
    grad_h, grad_weights = _swiglu_backward(h, grad_a, weights_TK, plan)
    if wants_down:
        # grad_a now holds the weighted activations.
        grad_down = _weight_grad(rows, grad_a, plan, down)
    if wants_gate_up:
        _gather(x_TH, plan, out=rows)
        grad_gate_up = _weight_grad(grad_h, rows, plan, gate_up)
    if wants_x:
        _rows_times_weight(grad_h, gate_up, rows, plan, transposed=True)
        grad_x = _sum_slots(rows, plan)
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


def _differentiate(ctx: Any, grad_TH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x_TH, weights_TK, gate_up, down, h, *plan = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:4])
    grad_TH = grad_TH.to(x_TH.dtype).contiguous()
    grads = _backward(grad_TH, x_TH, weights_TK, gate_up, down, h, wanted, *plan)
    given = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *given, *[None] * 7


_forward.register_autograd(_differentiate, setup_context=_save)


def _up(x_TH: Tensor, gate_up: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
    """h [P, 2I] and a [P, I]."""
    experts, double, width = gate_up.shape
    expert_width, rows, columns = double // 2, plan.token_P.shape[0], COLUMNS // 2
    h, a = x_TH.new_empty(rows, double), x_TH.new_empty(rows, expert_width)
    weight = gate_up.view(experts, 2, expert_width, width)
    programs = _programs(x_TH)
    kernels.up_kernel[(programs,)](
        x_TH,
        plan.token_P,
        TensorDescriptor.from_tensor(weight, [1, 2, columns, INNER]),
        TensorDescriptor.from_tensor(h.view(rows, 2, expert_width), [TILE_ROWS, 1, columns]),
        TensorDescriptor.from_tensor(a, [TILE_ROWS, columns]),
        plan.tile_expert_N,
        plan.tiles,
        width,
        expert_width,
        TILE=TILE_ROWS,
        BN=columns,
        BK=INNER,
        GROUP=GROUP,
        PROGRAMS=programs,
        EVEN=width % INNER == 0,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return h, a


def _rows_times_weight(
    rows: Tensor, weight: Tensor, out: Tensor, plan: RowPlan, *, transposed: bool
) -> None:
    """out [P, N] = rows [P, C] W^T for weight [E, N, C], or rows W for weight [E, C, N]."""
    block = [1, INNER, COLUMNS] if transposed else [1, COLUMNS, INNER]
    # Stored in halves, the tile leaves room in shared memory; it pays where the loop is long.
    halves = rows.shape[1] > out.shape[1] // 2
    programs = _programs(rows)
    kernels.rows_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows, [TILE_ROWS, INNER]),
        TensorDescriptor.from_tensor(weight, block),
        TensorDescriptor.from_tensor(out, [TILE_ROWS, COLUMNS // 2 if halves else COLUMNS]),
        plan.tile_expert_N,
        plan.tiles,
        rows.shape[1],
        out.shape[1],
        TRANSPOSED=transposed,
        TILE=TILE_ROWS,
        BN=COLUMNS,
        BK=INNER,
        GROUP=GROUP,
        PROGRAMS=programs,
        HALVES=halves,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _weight_grad(left: Tensor, right: Tensor, plan: RowPlan, weight: Tensor) -> Tensor:
    """The gradient of a weight [E, out, in]: left^T right over each expert's rows."""
    grad = torch.empty_like(weight)
    programs = _programs(weight)
    kernels.weight_grad_kernel[(programs,)](
        TensorDescriptor.from_tensor(left, [INNER, TILE_ROWS]),
        TensorDescriptor.from_tensor(right, [INNER, COLUMNS]),
        TensorDescriptor.from_tensor(grad, [1, TILE_ROWS, COLUMNS]),
        plan.offsets_E1,
        left.shape[1],
        right.shape[1],
        weight.shape[0],
        BM=TILE_ROWS,
        BN=COLUMNS,
        BK=INNER,
        GROUP=GROUP,
        PROGRAMS=programs,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return grad


def _swiglu_backward(
    h: Tensor, grad_a: Tensor, weights_TK: Tensor, plan: RowPlan
) -> tuple[Tensor, Tensor]:
    """The gradients of h [P, 2I] and of the router's weights [T, K]; overwrites grad_a."""
    grad_h = torch.empty_like(h)
    # An assignment without a row has no gradient.
    grad_weights = torch.zeros_like(weights_TK)
    kernels.swiglu_backward_kernel[(h.shape[0],)](
        h,
        grad_a,
        weights_TK.contiguous(),
        plan.flat_P,
        grad_h,
        grad_weights,
        plan.tiles,
        grad_a.shape[1],
        TILE=TILE_ROWS,
        BLOCK=triton.next_power_of_2(grad_a.shape[1]),
        num_warps=4,
    )
    return grad_h, grad_weights


def _sum_slots(rows: Tensor, plan: RowPlan, weights_TK: Tensor | None = None) -> Tensor:
    """Each token's K rows summed, weighted or not; [T, H]."""
    tokens, slots = plan.inverse_TK.shape
    out = rows.new_empty(tokens, rows.shape[1])
    block = min(2048, triton.next_power_of_2(rows.shape[1]))
    if tokens:
        kernels.sum_slots_kernel[(tokens, triton.cdiv(rows.shape[1], block))](
            rows,
            plan.inverse_TK,
            rows if weights_TK is None else weights_TK.contiguous(),
            out,
            rows.shape[1],
            SLOTS=slots,
            WEIGHTED=weights_TK is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


def _gather(x_TH: Tensor, plan: RowPlan, out: Tensor | None = None) -> Tensor:
    """x by rows, [P, H]; zeros in padding rows."""
    width, rows = x_TH.shape[1], plan.token_P.shape[0]
    out = x_TH.new_empty(rows, width) if out is None else out
    block = min(2048, triton.next_power_of_2(width))
    kernels.gather_kernel[(rows, triton.cdiv(width, block))](
        x_TH, plan.token_P, out, plan.tiles, width, TILE=TILE_ROWS, BLOCK=block, num_warps=4
    )
    return out


def _programs(tensor: Tensor) -> int:
    """One persistent program for each multiprocessor; a few where Triton's interpreter runs."""
    if tensor.device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
