"""The expert MLP as a plain loop over experts: the truth for every other backend.

Each expert takes its rows, applies SwiGLU between two products, and adds its weighted output to the
tokens' sums. It computes in fp64 for fp64 inputs and in fp32 for all others; autograd does the
rest.

Letters: T tokens, K experts per token, E experts, H width, I expert width.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe_kernels.grouping import Grouping


def expert_mlp(
    x_TH: Tensor, grouping: Grouping, weights_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """The MoE output [T, H] in the dtype of x; arguments as for `nmoe_kernels.layer.moe`.

    Reads the offsets on the host.
    """
    dtype = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
    bounds = grouping.offsets_E1.tolist()
    token_M, x_TH_wide = grouping.token_M, x_TH.to(dtype)
    rows = [
        _swiglu_mlp(x_TH_wide[token_M[start:end]], gate_up[e].to(dtype), down[e].to(dtype))
        for e, (start, end) in enumerate(pairwise(bounds))
    ]
    dropped = x_TH_wide.new_zeros(token_M.numel() - bounds[-1], x_TH.shape[1])
    y_TKH = torch.cat([*rows, dropped])[grouping.inverse_TK]
    return (y_TKH * weights_TK.to(dtype).unsqueeze(-1)).sum(1).to(x_TH.dtype)


def _swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
