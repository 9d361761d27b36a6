"""One optimizer step: micro-batches forward and backward, clipping, update, balancing bias.

Every loss is a mean over the whole global batch, whatever the split into ranks and micro-batches:
the cross-entropy over all predictions, the z-loss over all tokens, the balancing loss over all
sequences. Each part of the batch gives its part of that mean, and parts add up. This module reads
nothing back from the device until the step is queued.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from nmoe_kernels.router import load_stats, update_bias
from torch import Tensor

from nmoe_train.config import Config
from nmoe_train.data import Step
from nmoe_train.model import ModelOutput, Transformer
from nmoe_train.model.moe_block import router_bias
from nmoe_train.optim import GuardedAdamW, clip_gradients, rate_factor, set_rates
from nmoe_train.parallel.fsdp import last_backward
from nmoe_train.parallel.groups import ALONE, Groups
from nmoe_train.parallel.reduction import StepSums, reduce_step
from nmoe_train.telemetry.timers import StageTimer


@dataclass
class StepResult:
    """What a step reports, still on the device."""

    scalars: dict[str, Tensor]
    loads: dict[int, Tensor]
    """Tokens that each expert got, by layer; int64 [E]."""
    rates: dict[str, float]


def train_step(
    model: Transformer,
    optimizer: GuardedAdamW,
    share: Step,
    config: Config,
    tokens: int,
    timer: StageTimer,
    groups: Groups = ALONE,
) -> StepResult:
    """Trains on this rank's share of one global batch; `tokens` counts those seen after it.

    What it reports is the global batch's, the same on every rank. A gradient norm that is not
    finite leaves weights, moments and router biases as they were.
    """
    device = model.device
    sums: dict[str, Tensor] = {}
    loads: dict[int, Tensor] = {}
    for micro, last in _micro_batches(share, config, device):
        with timer.stage("forward"), groups.among_peers("in the forward pass"):
            output = model.hidden(micro.inputs_BS, micro.documents_BS)
            losses = _losses(model, output, micro, config)
        with timer.stage("backward"), groups.among_peers("in the backward pass"):
            last_backward(model, last)
            losses["loss/train"].backward()
        for name, value in losses.items():
            sums[name] = sums.get(name, torch.zeros((), device=device)) + value.detach()
        for layer, report in output.routing.items():
            loads[layer] = loads.get(layer, 0) + report.load_E
            sums["router/invalid"] = sums.get("router/invalid", 0) + report.invalid
    norm: Tensor | None = None
    if not groups.alone:
        with timer.stage("reduce"):
            total, norm = reduce_step(model, StepSums(sums, loads), groups)
        sums, loads = total.scalars, total.loads
    with timer.stage("optimizer"):
        sums["grad_norm"] = clip_gradients(model.parameters(), config.train.clip_norm, norm)
        rates = set_rates(optimizer, rate_factor(config, tokens))
        finite = sums["grad_norm"].isfinite()
        sums["skipped"] = optimizer.found_inf = (~finite).float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for layer, block in model.moe_blocks().items():
            # A load of nothing is an even one: a skipped step leaves the bias as it was.
            load = loads[layer] * finite
            update_bias(router_bias(block), load, config.model.moe.bias_update_rate)
    return StepResult(sums, loads, rates)


def step_record(result: StepResult, model: Transformer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The step's scalars and its expert loads as plain numbers, in one read of the device each."""
    names = list(result.scalars)
    values = torch.stack([result.scalars[name].double() for name in names]).tolist()
    record: dict[str, Any] = {**dict(zip(names, values, strict=True)), **result.rates}
    layers = sorted(result.loads)
    if not layers:
        return record, {"layers": [], "load": [], "bias": []}
    loads = torch.stack([result.loads[layer] for layer in layers]).cpu()
    blocks = model.moe_blocks()
    biases = torch.stack([router_bias(blocks[layer]) for layer in layers]).cpu()
    stats = load_stats(loads)
    record["router/load_imbalance"] = float(stats["imbalance"].mean())
    record["router/entropy"] = float(stats["entropy"].mean())
    record["router/dead_experts"] = int(stats["dead_experts"].sum())
    record["router/bias_range"] = float((biases.amax(1) - biases.amin(1)).max())
    experts = {"layers": layers, "load": loads.tolist(), "bias": biases.tolist()}
    return record, experts


def _micro_batches(
    share: Step, config: Config, device: torch.device
) -> Iterator[tuple[Step, bool]]:
    """Micro-batches, and whether each is the last."""
    size = config.train.micro_batch_size or share.inputs_BS.shape[0]
    for start in range(0, share.inputs_BS.shape[0], size):
        rows = slice(start, start + size)
        whole = (share.inputs_BS, share.documents_BS, share.targets_BS)
        inputs, documents, targets = (t[rows].to(device, non_blocking=True) for t in whole)
        micro = Step(inputs, documents, targets, share.predictions)
        yield micro, start + size >= share.inputs_BS.shape[0]


def _losses(
    model: Transformer, output: ModelOutput, micro: Step, config: Config
) -> dict[str, Tensor]:
    """This micro-batch's part of the losses of the global batch; parts add up to the whole."""
    moe = config.model.moe
    total = model.loss(output.hidden_BSH, micro.targets_BS, config.train.loss_chunk)
    ce = total / max(1, micro.predictions)
    losses = {"loss/ce": ce, "loss/train": ce}
    share = micro.inputs_BS.shape[0] / config.train.batch_size
    if output.routing:
        reports = output.routing.values()
        losses["loss/balance"] = share * torch.stack([r.balance_loss for r in reports]).sum()
        losses["loss/z"] = share * torch.stack([r.z_loss for r in reports]).sum()
        losses["loss/train"] = (
            ce + moe.balance_loss * losses["loss/balance"] + moe.z_loss * losses["loss/z"]
        )
    return losses
