"""The router: which experts a token goes to, with which weights, and what keeps the load even."""

import torch
from torch import Tensor

from nmoe_kernels.router.config import RouterConfig, Routing
from nmoe_kernels.router.controls import (
    apply_capacity,
    load_balance_loss,
    load_stats,
    sequence_balance_loss,
    update_bias,
    z_loss,
)
from nmoe_kernels.router.reference import route_reference

__all__ = [
    "RouterConfig",
    "Routing",
    "apply_capacity",
    "load_balance_loss",
    "load_stats",
    "route",
    "sequence_balance_loss",
    "update_bias",
    "z_loss",
]


def route(
    x_TH: Tensor, weight_EH: Tensor, config: RouterConfig, bias_E: Tensor | None = None
) -> Routing:
    """Chooses K experts for each of T tokens.

    x_TH: any float dtype. weight_EH: the router's fp32 weight. bias_E: added to the scores for the
    choice only, never part of the weights. Everything after x is computed in fp32, autocast or not.
    With groups, a group's score is the sum of its two best biased scores for sigmoid (DeepSeek-V3)
    and its best score for softmax (DeepSeek-V2). Same input, same answer: a replay by activation
    checkpointing gives the same ids. Pure: nothing is counted twice. Applies the configured
    capacity.
    Raises KernelError (E-ROUTER-SHAPE) when shapes do not fit.
    """
    with torch.autocast(x_TH.device.type, enabled=False):
        return apply_capacity(route_reference(x_TH, weight_EH, config, bias_E), config, bias_E)
