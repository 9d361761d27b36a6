"""Fully sharded data parallelism (FSDP2): weights, gradients and moments in parts over replicas.

What data-parallel ranks would hold alike is cut over them: dense matrices over the ranks of a
share's part, experts over the ranks that hold the same ones. A layer's weights are gathered just
before they are used, in the format of the activations, while the layer before still computes;
gradients are summed, not averaged, in fp32. Norms and routers are small and stay whole, in fp32.
Micro-batches accumulate whole gradients, and ranks add them once, in the last one's backward.
"""

import warnings
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import Shard

from nmoe_train.model import Transformer
from nmoe_train.parallel.groups import Groups


def shard_weights(model: Transformer, groups: Groups, device: torch.device) -> None:
    """Cuts the weights of an initialised model over the ranks that would hold them alike.

    They go to the device layer by layer, each cut before the next comes; what stays whole is not
    moved. Call it before the optimizer is built, which then has moments of what is here only.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if model.dtype == torch.float32 else model.dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    small = {parameter for name, parameter in model.named_parameters() if is_small(name)}
    stacks = {p for block in model.moe_blocks().values() for p in block.experts.parameters()}
    # Experts return a view of rows, and nothing changes it in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDP\w*MoE\) returned a view")
    if groups.replicas is not None:
        mesh = DeviceMesh.from_group(groups.replicas, device.type)
        for block in model.moe_blocks().values():
            fully_shard(
                block.experts,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=True,
                shard_placement_fn=partial(_placement, down=block.experts.down, ranks=mesh.size()),
                ignored_params=small,
            )
    for block in model.moe_blocks().values():
        # Gradients are reduced as soon as the layer's own stream is done with the backward, which
        # may be before a stream beside it has added those of the shared expert.
        block.overlaps = False
    if groups.data is not None:
        mesh = DeviceMesh.from_group(groups.data, device.type)
        kept = small | (stacks if groups.replicas is None else set())
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=kept)
        # The root keeps its weights from the embedding to the loss, which uses them from outside.
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=kept)
    _sum_gradients(model)
    _prefetch(model)
    if device.type == "cpu":
        _count_waits(model, groups)


def is_small(name: str) -> bool:
    """Whether a parameter stays whole: norms and routers."""
    return "norm" in name or ".router." in name


def last_backward(model: nn.Module, last: bool) -> None:
    """Says whether gradients are complete with the next backward: only then ranks add them."""
    for module in _sharded(model):
        module.set_requires_gradient_sync(last, recurse=False)


def free_gathered(model: nn.Module) -> None:
    """Gives up what was gathered for a forward pass that no backward follows."""
    for module in _sharded(model):
        module.reshard()


def _placement(weight: Tensor, down: Tensor, ranks: int) -> Shard:
    """Whole experts where they divide, else a part of each, else as many experts as there are.

    Along the model's width, so that a part of gate and up is the same part of both.
    """
    along = 1 if weight is down else 2
    return Shard(along if weight.shape[0] % ranks and weight.shape[along] % ranks == 0 else 0)


def _sharded(model: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _sum_gradients(model: nn.Module) -> None:
    """Losses are parts of a mean over the global batch, so that gradients add up."""
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class _CountedGather(DefaultAllGather):
    """FSDP's own, on the CPU, where it returns once all ranks have come."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def __call__(self, *arguments: Any, **named: Any) -> dist.Work | None:
        with self._groups.waiting("gathering weights"):
            return super().__call__(*arguments, **named)


class _CountedScatter(DefaultReduceScatter):
    """FSDP's own, on the CPU, where it returns once all ranks have come."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def __call__(self, *arguments: Any, **named: Any) -> dist.Work | None:
        with self._groups.waiting("adding gradients of sharded weights"):
            return super().__call__(*arguments, **named)


def _count_waits(model: nn.Module, groups: Groups) -> None:
    """Lets the time in FSDP's collectives count as waiting for others."""
    for module in _sharded(model):
        module.set_custom_all_gather(_CountedGather(groups))
        module.set_custom_reduce_scatter(_CountedScatter(groups))


def _prefetch(model: Transformer) -> None:
    """While a layer computes forward, the next one's weights come; backward this is FSDP's own."""
    layers = [layer for layer in model.layers if isinstance(layer, FSDPModule)]
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
