"""A kernel that reads a tensor once and keeps almost nothing: the floor of work that reads it."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


def reading(x: Tensor) -> Callable[[], Tensor]:
    """A work that reads contiguous x on CUDA and gives the sums of its blocks, fp32."""
    blocks = triton.cdiv(x.numel(), BLOCK)
    sums = torch.empty(blocks, dtype=torch.float32, device=x.device)

    def work() -> Tensor:
        read_kernel[(blocks,)](x, sums, x.numel(), BLOCK=BLOCK, num_warps=8)
        return sums

    return work


@triton.jit
def read_kernel(x_ptr, sums_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # it is Triton
    """sums[b] = sum of block b."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(x.to(tl.float32), 0))
