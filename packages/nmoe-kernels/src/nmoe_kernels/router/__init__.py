"""The router: which experts a token goes to, with which weights, and what keeps the load even."""

from typing import Any

import torch
from torch import Tensor

from nmoe_kernels.errors import KernelError
from nmoe_kernels.hardware import FUSED, pick_backend
from nmoe_kernels.router.config import RouterConfig, Routing
from nmoe_kernels.router.controls import (
    apply_capacity,
    count_choices,
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
    "count_choices",
    "load_balance_loss",
    "load_stats",
    "route",
    "sequence_balance_loss",
    "update_bias",
    "z_loss",
]


def route(
    x_TH: Tensor,
    weight_EH: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Routing:
    """Chooses K experts for each of T tokens.

    x_TH: any float dtype. weight_EH: the router's fp32 weight. bias_E: added to the scores for the
    choice only, never part of the weights. Everything after x is computed in fp32, autocast or not.
    With groups, a group's score is the sum of its two best biased scores for sigmoid (DeepSeek-V3)
    and its best score for softmax (DeepSeek-V2). Same input, same answer: a replay by activation
    checkpointing gives the same ids. Pure: nothing is counted twice. Applies the configured
    capacity. backend: that of the experts; bf16 tokens on those of `FUSED` are routed by fused
    kernels, all others in plain PyTorch.
    Raises KernelError: E-ROUTER-SHAPE when shapes do not fit, or those of `pick_backend`.
    """
    _check(x_TH, weight_EH, config, bias_E)
    name = pick_backend(backend, x_TH.device.type, x_TH.dtype)
    fused = name in FUSED and (x_TH.dtype, weight_EH.dtype) == (torch.bfloat16, torch.float32)
    with torch.autocast(x_TH.device.type, enabled=False):
        choose = _route_fused if fused else route_reference
        return apply_capacity(choose(x_TH, weight_EH, config, bias_E), config, bias_E)


def _route_fused(*arguments: Any) -> Routing:
    # Imported when picked: Triton is not installed everywhere.
    from nmoe_kernels.router.triton import route_triton

    return route_triton(*arguments)


def _check(x_TH: Tensor, weight_EH: Tensor, config: RouterConfig, bias_E: Tensor | None) -> None:
    if x_TH.dim() != 2:
        _shape_error("x", x_TH, "flatten it to [tokens, width]")
    if weight_EH.shape != (config.experts, x_TH.shape[1]):
        _shape_error("weight", weight_EH, f"make it {[config.experts, x_TH.shape[1]]}")
    if bias_E is not None and bias_E.shape != (config.experts,):
        _shape_error("bias", bias_E, f"make it {[config.experts]}")


def _shape_error(name: str, tensor: Tensor, remedy: str) -> None:
    raise KernelError("E-ROUTER-SHAPE", f"router {name} has shape {list(tensor.shape)}", remedy)
