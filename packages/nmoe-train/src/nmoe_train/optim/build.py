"""Weights in groups, each with its rate and decay, under the optimizer that a configuration names.

Four groups: dense matrices (decayed), dense vectors and embeddings (not decayed), routers (not
decayed), routed experts (decayed). With Muon, hidden matrices are groups of their own, with a
momentum, beside what AdamW keeps.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nmoe_train.config import OptimizerConfig
from nmoe_train.model import Transformer
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.matrices import hidden_weights
from nmoe_train.optim.adamw import GuardedAdamW
from nmoe_train.optim.muon import Muon, OnMatrices, matrices_here

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS = ("momentum_buffer",)


@dataclass(frozen=True)
class _Kind:
    """What the weights of a group have in common."""

    name: str
    decays: bool
    sharded: bool = False
    """One kernel updates either weights that are whole here or those that are cut over ranks."""
    orthogonal: bool = False


def build_optimizer(
    model: Transformer, config: OptimizerConfig, on_matrices: OnMatrices | None = None
) -> GuardedAdamW:
    """The optimizer of a model that is on its device, and cut over ranks if it is to be.

    Its groups carry `name` ("dense", "router", "expert"), `peak_lr` and the names of their
    `moments`. `on_matrices`: applies a function to matrices of which ranks have parts; None where
    they are here whole.
    """
    rates = {
        "dense": config.lr,
        "router": config.lr_router or config.lr,
        "expert": config.lr_expert or config.lr,
    }
    hidden: dict[str, nn.Parameter] = {}
    if config.name == "muon":
        parameters = dict(model.named_parameters())
        hidden = {name: parameters[name] for name in hidden_weights(model)}
    members = _members(model, hidden)
    groups: list[dict[str, Any]] = [
        {
            "params": parameters,
            "name": kind.name,
            "peak_lr": rates[kind.name],
            "lr": rates[kind.name],
            "weight_decay": config.weight_decay if kind.decays else 0.0,
            "moments": MUON_MOMENTS if kind.orthogonal else ADAMW_MOMENTS,
            **({"momentum": config.momentum} if kind.orthogonal else {}),
        }
        for kind, parameters in members.items()
    ]
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps, "fused": True}
    if config.name == "adamw":
        return GuardedAdamW(groups, **options)
    return Muon(groups, hidden, on_matrices or matrices_here(model), **options)


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Sets every group's rate to its peak times `factor`; returns the rates as `lr/<group>`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return {f"lr/{group['name']}": group["lr"] for group in optimizer.param_groups}


def _members(model: Transformer, hidden: Container[str]) -> dict[_Kind, list[Tensor]]:
    """Weights by what they have in common."""
    # All of them on every stage of a pipeline, also where it has none of the weights.
    members: dict[_Kind, list[Tensor]] = {
        _Kind("dense", True): [],
        _Kind("expert", True): [],
        _Kind("dense", False): [],
        _Kind("router", False): [],
    }
    for name, parameter in model.named_parameters():
        group = _group_of(name)
        decays = group != "router" and parameter.ndim > 1 and "embedding" not in name
        kind = _Kind(group, decays, isinstance(parameter, DTensor), name in hidden)
        members.setdefault(kind, []).append(parameter)
    return members


def _group_of(name: str) -> str:
    if ".router." in name:
        return "router"
    return "expert" if STACKED_EXPERTS.search(name) else "dense"
