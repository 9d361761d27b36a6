"""The experts of one rank on rows that have their ids: one entrance to every backend.

Letters: N rows, K slots per row, E experts here, H width, I expert width, A assignments.
"""

from typing import Any

import torch
from torch import Tensor

from nmoe_kernels.gemm import reference as reference_gemm
from nmoe_kernels.gemm import torch as torch_gemm
from nmoe_kernels.grouping import Grouping, group_rows
from nmoe_kernels.hardware import FUSED


def run_experts(
    x_NH: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    backend: str,
    recompute: bool = False,
    assignments: int | None = None,
) -> Tensor:
    """The weighted output [N, H] in the dtype of x; a slot whose id is not in [0, E) adds nothing.

    Differentiable in x, weights, gate_up [E, 2*I, H] and down [E, H, I], which are cast to the
    dtype of x. backend: as `pick_backend` gave it. recompute: all but reference keep no
    pre-activation for the backward. assignments: a bound of the slots that have an expert, when
    they are fewer than N * K, so that no rows are made for the others.
    """
    with torch.autocast(x_NH.device.type, enabled=False):
        weights = (weights_NK, gate_up.to(x_NH.dtype), down.to(x_NH.dtype))
        if backend in FUSED:
            return _fused_expert_mlp(x_NH, ids_NK, *weights, recompute, assignments, backend)
        grouping = group_rows(ids_NK, gate_up.shape[0])
        if assignments is not None:
            grouping = _shortened(grouping, assignments)
        if backend == "reference":
            return reference_gemm.expert_mlp(x_NH, grouping, *weights)
        return torch_gemm.expert_mlp(x_NH, grouping, *weights, recompute)


def _shortened(grouping: Grouping, assignments: int) -> Grouping:
    """A grouping without rows for all but one of the slots that belong to no expert."""
    return grouping._replace(
        order_M=grouping.order_M[: assignments + 1],
        token_M=grouping.token_M[: assignments + 1],
        inverse_TK=grouping.inverse_TK.clamp_max(assignments),
    )


def _fused_expert_mlp(*arguments: Any) -> Tensor:
    # Imported when picked: Triton is not installed everywhere.
    from nmoe_kernels.gemm.fused import expert_mlp

    return expert_mlp(*arguments)
