"""Routed experts of which each of a few tensor-parallel neighbours holds a part of the width.

Every neighbour routes its own positions. They gather states and choices, each makes its part of the
experts' hidden units for all of these tokens, and what the parts give is summed while it is
scattered back. Rows of gate and up and columns of down belong together, as in a dense MLP.

Letters: B sequences, s positions of this rank, T tokens of all neighbours, H width, K experts of a
token.
"""

from dataclasses import replace
from typing import Any

import torch
from nmoe_kernels import MoE, RouterConfig, Routing, moe
from nmoe_kernels.rdep import expert_parallel_moe
from torch import Tensor

from nmoe_train.model.tensor import TensorParallel


class SplitMoE(MoE):
    """An MoE layer with this rank's part of each expert that it holds.

    tensor: the ranks that share sequences. split: those consecutive ones among them that share
    experts; their number divides `expert_width`.
    """

    def __init__(
        self,
        width: int,
        expert_width: int,
        router: RouterConfig,
        *,
        tensor: TensorParallel,
        split: TensorParallel,
        **options: Any,
    ) -> None:
        super().__init__(width, expert_width // split.ranks, router, **options)
        self.tensor, self.split = tensor, split

    def forward(self, x_BsH: Tensor, positions: int) -> tuple[Tensor, Routing]:  # type: ignore[override]  # positions are cut
        """x [B, s, H] of `positions` in all -> (y [B, s, H], the routing of its tokens)."""
        own = self.router(x_BsH.flatten(0, 1), self.backend)
        first = self.tensor.rank - self.split.rank
        theirs = self.tensor.lengths(positions)[first : first + self.split.ranks]
        x_TH = self.split.gather(x_BsH, sum(theirs)).flatten(0, 1)
        every = self._gather(own, x_BsH.shape[0], sum(theirs))
        options: dict[str, Any] = {"backend": self.backend, "recompute": self.recompute}
        if self.expert_parallel is None:
            y_TH = moe(x_TH, every, self.gate_up, self.down, **options)
        else:
            group = self.expert_parallel
            y_TH = expert_parallel_moe(
                x_TH, every, self.gate_up, self.down, group, name=self.name, **options
            )
        return self.split.scatter_sum(y_TH.unflatten(0, (x_BsH.shape[0], sum(theirs)))), own

    def _gather(self, own: Routing, batch: int, positions: int) -> Routing:
        """What the neighbours chose for their tokens; a bad row is one that chose no expert."""
        ids_TK = torch.where(own.valid_T[:, None], own.ids_TK, self.router.config.experts)
        slots = ids_TK.shape[1]
        ids_BTK = self.split.collect(ids_TK.view(batch, -1, slots), 1, positions)
        weights_BTK = self.split.gather(own.weights_TK.view(batch, -1, slots), positions)
        return replace(
            own,
            ids_TK=ids_BTK.flatten(0, 1),
            weights_TK=weights_BTK.flatten(0, 1),
            valid_T=torch.ones(batch * positions, dtype=torch.bool, device=ids_TK.device),
        )
