"""One optimizer step: micro-batches forward and backward, clipping, update, balancing bias.

Every loss is a mean over the whole global batch, whatever the split into ranks and micro-batches:
the cross-entropy over all predictions, the z-loss over all tokens, the balancing loss over all
sequences. Each part of the batch gives its part of that mean, and parts add up. This module reads
nothing back from the device until the step is queued.
"""

from collections.abc import Callable, Iterator
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
from nmoe_train.parallel.groups import ALONE, Groups
from nmoe_train.parallel.pipeline import Pipeline
from nmoe_train.parallel.reduction import StepSums, reduce_step
from nmoe_train.telemetry.timers import StageTimer


@dataclass
class StepResult:
    """What a step reports, still on the device."""

    scalars: dict[str, Tensor]
    loads: dict[int, Tensor]
    """Tokens that each expert got, by layer; int64 [E]."""
    biases: dict[int, Tensor]
    """The routers' balancing biases after the step, by layer; fp32 [E]."""
    rates: dict[str, float]


def train_step(
    model: Transformer,
    optimizer: GuardedAdamW,
    share: Step,
    config: Config,
    tokens: int,
    timer: StageTimer,
    groups: Groups = ALONE,
    pipeline: Pipeline | None = None,
    reduced: Callable[[], None] | None = None,
) -> StepResult:
    """Trains on this rank's share of one global batch; `tokens` counts those seen after it.

    `pipeline`: the stage that the model is part of; None where it is all of it. `reduced` is called
    once the gradients of all ranks are added up. What the step reports is the global batch's, the
    same on every rank. A gradient norm that is not finite leaves weights, moments and router biases
    as they were.
    """
    device = model.device
    total = _nothing_yet(config, device)

    def losses(output: ModelOutput, micro: Step) -> Tensor:
        found = _losses(model, output, micro, config)
        _note(total, output, found)
        return found["loss/train"]

    micros = list(_micro_batches(share, config, device))
    step = tokens // config.tokens_per_step
    (pipeline or Pipeline(model, groups)).train(step, micros, losses, timer.stage)
    norm: Tensor | None = None
    if not groups.alone:
        with timer.stage("reduce"):
            total, norm = reduce_step(model, total, groups)
            if reduced is not None:
                reduced()
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
    return StepResult(sums, loads, _all_biases(model, loads, groups), rates)


def step_record(result: StepResult) -> tuple[dict[str, Any], dict[str, Any]]:
    """The step's scalars and its expert loads as plain numbers, in one read of the device each."""
    names = list(result.scalars)
    values = torch.stack([result.scalars[name].double() for name in names]).tolist()
    record: dict[str, Any] = {**dict(zip(names, values, strict=True)), **result.rates}
    layers = sorted(result.loads)
    if not layers:
        return record, {"layers": [], "load": [], "bias": []}
    loads = torch.stack([result.loads[layer] for layer in layers]).cpu()
    biases = torch.stack([result.biases[layer] for layer in layers]).cpu()
    stats = load_stats(loads)
    record["router/load_imbalance"] = float(stats["imbalance"].mean())
    record["router/entropy"] = float(stats["entropy"].mean())
    record["router/dead_experts"] = int(stats["dead_experts"].sum())
    record["router/bias_range"] = float((biases.amax(1) - biases.amin(1)).max())
    experts = {"layers": layers, "load": loads.tolist(), "bias": biases.tolist()}
    return record, experts


def _micro_batches(share: Step, config: Config, device: torch.device) -> Iterator[Step]:
    size = config.train.micro_batch_size or share.inputs_BS.shape[0]
    for start in range(0, share.inputs_BS.shape[0], size):
        rows = slice(start, start + size)
        whole = (share.inputs_BS, share.documents_BS, share.targets_BS)
        inputs, documents, targets = (t[rows].to(device, non_blocking=True) for t in whole)
        yield Step(inputs, documents, targets, share.predictions)


def _nothing_yet(config: Config, device: torch.device) -> StepSums:
    """Zeros under all names that any stage of a pipeline reports."""
    model = config.model
    layers = range(model.dense_layers, model.layers)
    names = ["loss/ce", "loss/train"]
    if layers:
        names += ["loss/balance", "loss/z", "router/invalid"]
    zero = torch.zeros((), device=device)
    load = torch.zeros(model.moe.experts, dtype=torch.int64, device=device)
    return StepSums(dict.fromkeys(names, zero), dict.fromkeys(layers, load))


def _note(total: StepSums, output: ModelOutput, losses: dict[str, Tensor]) -> None:
    """Adds what the forward of a micro-batch through some layers gave."""
    for name, value in losses.items():
        total.scalars[name] = total.scalars[name] + value.detach()
    for layer, report in output.routing.items():
        total.loads[layer] = total.loads[layer] + report.load_E
        total.scalars["router/invalid"] = total.scalars["router/invalid"] + report.invalid


def _losses(
    model: Transformer, output: ModelOutput, micro: Step, config: Config
) -> dict[str, Tensor]:
    """What some layers give to the losses of the global batch for a micro-batch; parts add up."""
    moe = config.model.moe
    losses = {"loss/train": torch.zeros((), device=model.device)}
    if output.is_last:
        total = model.loss(output.hidden_BSH, micro.targets_BS, config.train.loss_chunk)
        losses["loss/ce"] = losses["loss/train"] = total / max(1, micro.predictions)
    share = micro.inputs_BS.shape[0] / config.train.batch_size
    if output.routing:
        reports = output.routing.values()
        losses["loss/balance"] = share * torch.stack([r.balance_loss for r in reports]).sum()
        losses["loss/z"] = share * torch.stack([r.z_loss for r in reports]).sum()
        losses["loss/train"] = (
            losses["loss/train"]
            + moe.balance_loss * losses["loss/balance"]
            + moe.z_loss * losses["loss/z"]
        )
    return losses


def _all_biases(model: Transformer, loads: dict[int, Tensor], groups: Groups) -> dict[int, Tensor]:
    """The biases of all layers that have a load, those of other stages too."""
    blocks = model.moe_blocks()
    here = {layer: router_bias(block) for layer, block in blocks.items()}
    if groups.pipeline is None or not loads:
        return here
    biases_LE = torch.stack(
        [here[n] if n in here else torch.zeros_like(load).float() for n, load in loads.items()]
    )
    groups.sum_within_(biases_LE, groups.pipeline, "the routers' biases")
    return dict(zip(loads, biases_LE, strict=True))
