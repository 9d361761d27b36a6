"""The feed-forward part of a Mixture-of-Experts layer: routed experts beside a shared one.

Letters: B sequences, S positions, H width, E experts.
"""

from dataclasses import dataclass

import torch
from nmoe_kernels import MoE, RouterConfig
from nmoe_kernels.rdep import ExpertParallel
from nmoe_kernels.router import sequence_balance_loss, z_loss
from torch import Tensor, nn

from nmoe_train.config import ModelConfig
from nmoe_train.model.layers import SwiGLU


@dataclass
class RoutingReport:
    """What one layer's router did in one forward pass."""

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
        self, config: ModelConfig, expert_parallel: ExpertParallel | None = None, name: str = ""
    ) -> None:
        super().__init__()
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
        self.experts = MoE(
            config.width, moe.expert_width, router, expert_parallel=expert_parallel, name=name
        )
        hidden = moe.shared_experts * moe.expert_width
        self.shared = SwiGLU(config.width, hidden) if hidden else None

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, RoutingReport]:
        """Maps x [B, S, H] to [B, S, H] and reports the routing."""
        routed, routing = self.experts(x_BSH)
        report = RoutingReport(
            load_E=routing.load_E,
            invalid=routing.invalid,
            balance_loss=sequence_balance_loss(
                routing.scores_TE, routing.ids_TK, rows=x_BSH.shape[0]
            ),
            z_loss=z_loss(routing.logits_TE),
        )
        y = routed if self.shared is None else routed + self.shared(x_BSH)
        return y, report


def router_bias(block: MoEBlock) -> Tensor:
    """The balancing bias of a block's router, fp32 [E]; changed in place by the trainer."""
    bias = block.experts.router.bias
    assert isinstance(bias, torch.Tensor)
    return bias
