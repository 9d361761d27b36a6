"""Small layers that everything is made of: linear maps, RMSNorm and the SwiGLU MLP.

Parameters are the fp32 master weights. They are cast to the format of the activations at each use,
so that one model computes in fp32 or bf16, and gradients arrive and accumulate in fp32.
Letters: `...` any leading shape, H width, I hidden width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T without bias; `weight` [out, in] fp32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., in] to [..., out] in the format of x."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 (Zhang and Sennrich 2019); `weight` [H] fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of x [..., H], in the format of x."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., H] to [..., H]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
