"""From the ids of T tokens to rows sorted by expert.

Row r of the sorted order is one assignment (token t, slot k) of the M = T*K, flat index t*K + k. A
stable sort by expert keeps the assignments of one expert in order of their flat index. Offsets come
from a binary search in the sorted ids, so nothing is counted with atomics or read on the host.

Letters: T tokens, K experts per token, E experts, M = T*K rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Grouping(NamedTuple):
    """Where each assignment lies once sorted by expert.

    order_M: int64, row -> flat index t*K + k. token_M: int64, row -> t. offsets_E1: int32 [E + 1],
    expert e owns rows offsets[e] to offsets[e + 1]. inverse_TK: int64, (t, k) -> row. Rows from
    offsets[E] on belong to no expert (dropped assignments); what kernels leave there is garbage.
    """

    order_M: Tensor
    token_M: Tensor
    offsets_E1: Tensor
    inverse_TK: Tensor

    @property
    def kept_TK(self) -> Tensor:
        """bool [T, K]: whether the assignment belongs to an expert."""
        return self.inverse_TK < self.offsets_E1[-1]


def group_rows(ids_TK: Tensor, experts: int) -> Grouping:
    """Sorts the assignments of [T, K] ids by expert, stably; ids outside [0, experts) go last.

    Works for T = 0 and on any device, without a host read.
    """
    flat_M = ids_TK.reshape(-1)
    flat_M = torch.where((flat_M >= 0) & (flat_M < experts), flat_M, experts)
    sorted_M, order_M = torch.sort(flat_M, stable=True)
    bounds = torch.arange(experts + 1, device=flat_M.device, dtype=flat_M.dtype)
    inverse_M = torch.empty_like(order_M)
    inverse_M.scatter_(0, order_M, torch.arange(order_M.numel(), device=order_M.device))
    return Grouping(
        order_M=order_M,
        token_M=order_M // ids_TK.shape[1],
        offsets_E1=torch.searchsorted(sorted_M, bounds, out_int32=True),
        inverse_TK=inverse_M.view(ids_TK.shape),
    )
