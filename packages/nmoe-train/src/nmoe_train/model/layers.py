"""Small layers that everything is made of: linear maps, embedding, RMSNorm and the SwiGLU MLP.

Parameters are the fp32 master weights. They are cast to the format of the activations at each use,
so that one model computes in fp32 or bf16, and gradients arrive and accumulate in fp32.
A layer that takes a `tensor` holds this rank's part of its weights: rows of what widens, columns of
what narrows, so that it wants all positions and what it gives is to be summed over ranks.
Letters: `...` any leading shape, B sequences, S positions, s of them here, H width, I hidden width,
V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_train.model.deferred import linear
from nmoe_train.model.tensor import WHOLE, Cut, Stack, TensorParallel


class Linear(nn.Module):
    """y = x W^T without bias; `weight` [out, in] fp32, or the `cut` of it that is here.

    `stack`: the maps that it holds side by side; None where it is one.
    """

    def __init__(
        self, inputs: int, outputs: int, cut: Cut | None = None, stack: Stack | None = None
    ) -> None:
        super().__init__()
        self.cut, self.stack = cut, stack
        shape = [outputs, inputs]
        if cut is not None:
            shape[cut.dim] = cut.length
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., in] to [..., out] in the format of x."""
        return linear(x, self.weight)


class Embedding(nn.Module):
    """A vector for each token; `weight` [V, H] fp32, of which each rank holds a run of rows."""

    def __init__(self, vocab_size: int, width: int, tensor: TensorParallel = WHOLE) -> None:
        super().__init__()
        self.tensor, self.cut = tensor, tensor.cut(0, vocab_size)
        rows = vocab_size if self.cut is None else self.cut.length
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens_BS: Tensor, dtype: torch.dtype) -> Tensor:
        """Vectors [B, s, H] of this rank's positions of the tokens [B, S]."""
        if self.cut is None:
            return F.embedding(tokens_BS, self.weight).to(dtype)
        row_BS = tokens_BS - self.cut.start
        here_BS = (row_BS >= 0) & (row_BS < self.cut.length)
        x_BSH = F.embedding(row_BS.clamp(0, self.cut.length - 1), self.weight).to(dtype)
        # One rank's row and zeros: their sum is exact in any format.
        return self.tensor.scatter_sum(x_BSH.masked_fill(~here_BS[..., None], 0.0))


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

    def __init__(self, width: int, hidden: int, tensor: TensorParallel = WHOLE) -> None:
        super().__init__()
        rows, columns = tensor.cut(0, hidden), tensor.cut(1, hidden)
        self.gate = Linear(width, hidden, rows)
        self.up = Linear(width, hidden, rows)
        self.down = Linear(hidden, width, columns)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., H] to [..., H]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
