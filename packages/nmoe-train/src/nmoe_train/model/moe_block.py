"""The feed-forward part of a Mixture-of-Experts layer: routed experts beside a shared one.

Letters: B sequences, S positions, s of them here, H width, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from nmoe_kernels import MoE, RouterConfig, Routing
from nmoe_kernels.rdep import ExpertParallel
from nmoe_kernels.router import count_choices, sequence_balance_loss, z_loss
from torch import Tensor, nn

from nmoe_train.config import ModelConfig
from nmoe_train.model.layers import SwiGLU
from nmoe_train.model.split_experts import SplitMoE
from nmoe_train.model.tensor import WHOLE, TensorParallel


@dataclass
class RoutingReport:
    """What one layer's router did in one forward pass, with the positions of this rank.

    Where ranks share the sequences, each has its part of the losses, and parts add up.
    """

    load_E: Tensor
    """Tokens sent to each expert, int64."""
    invalid: Tensor
    """Tokens whose logits were not finite, int64 scalar."""
    balance_loss: Tensor
    """Sequence-wise balancing loss, mean over sequences, unscaled."""
    z_loss: Tensor
    """Router z-loss, mean over tokens, unscaled."""


class MoEBlock(nn.Module):
    """sum of the chosen experts plus the shared expert (DeepSeekMoE, arXiv 2401.06066)."""

    def __init__(
        self,
        config: ModelConfig,
        expert_parallel: ExpertParallel | None = None,
        name: str = "",
        tensor: TensorParallel = WHOLE,
        expert_tensor: TensorParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.tensor, self.expert_parallel = tensor, expert_parallel
        self.overlaps = True
        """Whether the shared expert may compute in a stream of its own."""
        moe = config.moe
        router = RouterConfig(
            experts=moe.experts,
            top_k=moe.top_k,
            score=moe.score,
            groups=moe.groups,
            top_groups=moe.top_groups,
            renormalise=moe.renormalise,
            scale=moe.scale,
        )
        shape = (config.width, moe.expert_width, router)
        options: dict[str, Any] = {"expert_parallel": expert_parallel, "name": name}
        self.split = not expert_tensor.alone
        self.experts = (
            SplitMoE(*shape, tensor=tensor, split=expert_tensor, **options)
            if self.split
            else MoE(*shape, **options)
        )
        hidden = moe.shared_experts * moe.expert_width
        self.shared = SwiGLU(config.width, hidden, tensor) if hidden else None

    def forward(self, x_BsH: Tensor, positions: int) -> tuple[Tensor, RoutingReport]:
        """Maps x [B, s, H] to [B, s, H] and reports the routing.

        `positions`: S, of which x holds those of this rank.
        """
        shared = self._start_shared(x_BsH, positions)
        y_BsH, routing = self.experts(x_BsH, *([positions] if self.split else []))
        report = RoutingReport(
            load_E=routing.load_E,
            invalid=routing.invalid,
            balance_loss=self._balance_loss(routing, x_BsH.shape[0], positions),
            z_loss=z_loss(routing.logits_TE) * (x_BsH.shape[1] / positions),
        )
        return y_BsH if shared is None else y_BsH + shared(), report

    def _start_shared(self, x_BsH: Tensor, positions: int) -> Callable[[], Tensor] | None:
        """Begins the shared expert, beside the exchange where tokens travel to their experts."""
        if self.shared is None:
            return None
        mlp = self.shared

        def work(x_BsH: Tensor) -> Tensor:
            return self.tensor.scatter_sum(mlp(self.tensor.gather(x_BsH, positions)))

        if self.expert_parallel is None or not self.overlaps:
            return partial(work, x_BsH)
        return self.expert_parallel.start_beside(work, x_BsH)

    def _balance_loss(self, routing: Routing, rows: int, positions: int) -> Tensor:
        """How often a sequence chose an expert counts over all ranks; scores are those here."""
        chosen_RE = count_choices(routing.ids_TK, rows, routing.scores_TE.shape[1])
        return sequence_balance_loss(
            routing.scores_TE,
            routing.ids_TK,
            rows,
            length=positions,
            chosen_RE=self.tensor.sum_(chosen_RE),
        )


def router_bias(block: MoEBlock) -> Tensor:
    """The balancing bias of a block's router, fp32 [E]; changed in place by the trainer."""
    bias = block.experts.router.bias
    assert isinstance(bias, torch.Tensor)
    return bias
