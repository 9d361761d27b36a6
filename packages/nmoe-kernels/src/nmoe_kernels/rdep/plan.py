"""Which token goes to which rank, and where its row lies there, from the ids alone.

A token that chose several experts of one owner is sent to it once. Its slot is its place among this
source's rows for that owner, in token order: a prefix sum, so that no atomic decides where a row
lies. Received rows lie by (source rank, token); the stable grouping of the expert MLP then puts
them by (expert, source rank, token), as a single rank that holds all tokens would. Nothing here
reads a tensor on the host.

Two layouts of received rows exist: packed, where sources follow each other without gaps, and fixed
segments, where source s has the rows from s * T_max on. A slot fits 32 bits; a row of a segment,
and any offset in elements or bytes, may not, and is computed in 64.

Letters: R ranks of the group, E experts, E_l = E / R of them owned by each rank, contiguous, T
tokens of this rank, T_max the most that any rank has, K experts per token, H width, S rows sent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens that one program of the plan's kernels takes.
PLANNED_TOKENS = 128


@dataclass(frozen=True)
class SourcePlan:
    """What a rank sends.

    ids_TK: the experts of each token; an id outside [0, E) was dropped. slot_TR: int32, the place
    of a token's row among this source's rows for that owner, -1 where it is not sent. rows_R:
    int64, rows for each owner. assignments_R: int64, (token, slot) pairs for each owner.
    """

    ids_TK: Tensor
    slot_TR: Tensor
    rows_R: Tensor
    assignments_R: Tensor
    experts_local: int

    @property
    def sent_TR(self) -> Tensor:
        """bool [T, R]: whether the owner gets a row of this token."""
        return self.slot_TR >= 0

    def sent_order(self, total: int) -> tuple[Tensor, Tensor]:
        """Owner and token, int64 [S] each, of the rows to send, by (owner, token).

        total: S, the sum of `rows_R`, which the caller knows.
        """
        pairs = torch.nonzero_static(self.sent_TR.t(), size=total)
        return pairs[:, 0], pairs[:, 1]

    def local_ids(self, owner_S: Tensor, token_S: Tensor) -> tuple[Tensor, Tensor]:
        """For rows to owners: int32 [S, K], their local experts; bool [S, K], which are theirs.

        A slot whose expert is another rank's, or was dropped, has id -1.
        """
        ids_SK = self.ids_TK[token_S]
        first_S1 = (owner_S * self.experts_local).unsqueeze(-1)
        own_SK = (ids_SK >= first_S1) & (ids_SK < first_S1 + self.experts_local)
        return torch.where(own_SK, ids_SK - first_S1, -1).to(torch.int32), own_SK


def plan_source(ids_TK: Tensor, experts: int, ranks: int) -> SourcePlan:
    """Plans what this rank sends for ids [T, K], on their device.

    `ranks` divides `experts`; T may be 0, K may pass E_l, ids outside [0, experts) go nowhere.
    """
    experts_local = experts // ranks
    if ids_TK.is_cuda:
        return _plan_by_kernels(ids_TK, experts, ranks)
    inside_TK = (ids_TK >= 0) & (ids_TK < experts)
    # One more column takes the assignments that go nowhere.
    owner_TK = torch.where(inside_TK, ids_TK // experts_local, ranks).to(torch.int64)
    chosen = torch.zeros(ids_TK.shape[0], ranks + 1, dtype=torch.int32, device=ids_TK.device)
    chosen.scatter_add_(1, owner_TK, torch.ones_like(owner_TK, dtype=torch.int32))
    chosen_TR = chosen[:, :ranks]
    sent_TR = chosen_TR > 0
    place_TR = sent_TR.cumsum(0, dtype=torch.int32) - 1
    return SourcePlan(
        ids_TK=ids_TK,
        slot_TR=torch.where(sent_TR, place_TR, -1),
        rows_R=sent_TR.sum(0),
        assignments_R=chosen_TR.sum(0, dtype=torch.int64),
        experts_local=experts_local,
    )


def _plan_by_kernels(ids_TK: Tensor, experts: int, ranks: int) -> SourcePlan:
    """The same plan by two launches of Triton."""
    # Imported when used: Triton is not installed everywhere.
    import triton

    from nmoe_kernels.rdep import kernels

    (tokens, slots), experts_local = ids_TK.shape, experts // ranks
    blocks = max(1, triton.cdiv(tokens, PLANNED_TOKENS))
    ids = ids_TK.contiguous()
    counts = torch.empty(blocks, ranks, 2, dtype=torch.int32, device=ids.device)
    slot_TR = torch.empty(tokens, ranks, dtype=torch.int32, device=ids.device)
    rows_R, assignments_R = torch.empty(2, ranks, dtype=torch.int64, device=ids.device)
    sizes = (tokens, slots, experts, experts_local, ranks)
    tile = {"SLOTS": triton.next_power_of_2(slots), "BLOCK": PLANNED_TOKENS}
    kernels.count_kernel[(blocks,)](ids, counts, *sizes, **tile)
    kernels.place_kernel[(blocks,)](
        ids,
        counts,
        slot_TR,
        rows_R,
        assignments_R,
        *sizes,
        blocks,
        **tile,
        BLOCKS=triton.next_power_of_2(blocks),
    )
    return SourcePlan(ids, slot_TR, rows_R, assignments_R, experts_local)
