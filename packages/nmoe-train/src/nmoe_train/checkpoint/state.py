"""The state of a training by name: what a checkpoint holds, whatever the layout.

`model.<parameter>` is the fp32 master weight, `optimizer.<moment>.<parameter>` its moments. Stacked
experts are taken apart, one tensor an expert (`model.layers.3.moe.experts.17.down`, by its number
among all experts), so that a rank owns and reads whole tensors however experts are spread.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nmoe_train.errors import TrainError
from nmoe_train.model import Transformer
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.parallel import Layout

MOMENTS = ("exp_avg", "exp_avg_sq")
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_up|down)$")


def gather_state(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state on this rank by name; they share memory with the training."""
    return dict(_named_tensors(model, optimizer))


def owned_state(state: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """What of a rank's state it writes, so that each tensor is written once.

    Dense tensors are the first rank's, and an expert's those of the first rank that holds it.
    """
    return {
        name: tensor
        for name, tensor in state.items()
        if (layout.writes_experts if EXPERT.search(name) else layout.rank == 0)
    }


def restore_state(
    model: Transformer, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor], step: int
) -> None:
    """Copies saved tensors into the training, in place; reads those that this rank holds.

    Raises TrainError `E-CHECKPOINT-STATE` when names or shapes are not those of this training.
    """
    _materialise_moments(model, optimizer, step)
    wanted = gather_state(model, optimizer)
    odd = sorted(wanted.keys() ^ {name for name in saved if not _is_elsewhere(name, model)})
    if odd:
        raise TrainError(
            "E-CHECKPOINT-STATE",
            f"checkpoint and model differ in {len(odd)} tensors, {odd[0]} among them",
            "resume with the configuration that wrote the checkpoint",
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            value = saved[name]
            if tensor.shape != value.shape:
                raise TrainError(
                    "E-CHECKPOINT-STATE",
                    f"{name} is {tuple(value.shape)} in the checkpoint and "
                    f"{tuple(tensor.shape)} in the model",
                    "resume with the configuration that wrote the checkpoint",
                )
            tensor.copy_(value)


def _is_elsewhere(name: str, model: Transformer) -> bool:
    """Whether a tensor is that of an expert of this model that another rank holds."""
    found = EXPERT.search(name)
    if found is None:
        return False
    expert = int(found[1])
    return expert < model.config.moe.experts and expert not in model.local_experts


def _named_tensors(
    model: Transformer, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    experts = model.local_experts
    for name, buffer in model.named_buffers():
        yield f"model.{name}", buffer
    for name, parameter in model.named_parameters():
        yield from _apart(f"model.{name}", parameter.detach(), experts)
        moments = optimizer.state.get(parameter, {})
        for moment in MOMENTS:
            if moment in moments:
                yield from _apart(f"optimizer.{moment}.{name}", moments[moment], experts)


def _apart(name: str, tensor: Tensor, experts: range) -> Iterator[tuple[str, Tensor]]:
    """A tensor under its name, or a stack of experts one by one under their numbers."""
    if not STACKED_EXPERTS.search(name):
        yield name, tensor
        return
    stack, _, matrix = name.rpartition(".")
    for expert, weight in zip(experts, tensor, strict=True):
        yield f"{stack}.{expert}.{matrix}", weight


def _materialise_moments(model: Transformer, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gives every parameter the optimizer state that it has after `step` steps, to be filled."""
    for parameter in model.parameters():
        moments: dict[str, Tensor] = {
            moment: torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for moment in MOMENTS
        }
        counter = torch.tensor(float(step), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {"step": counter, **moments}
