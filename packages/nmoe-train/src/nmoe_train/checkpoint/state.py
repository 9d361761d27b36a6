"""The state of a training by name: what a checkpoint holds, whatever the layout.

`model.<parameter>` is the fp32 master weight, `optimizer.<moment>.<parameter>` its moments. Stacked
experts are taken apart, one tensor an expert (`model.layers.3.moe.experts.17.down`, by its number
among all experts), so that a rank reads what it needs however experts are spread. Of what is cut
over ranks each has a box, whose place in the whole tensor is known.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from nmoe_train.checkpoint.box import Box, whole_box
from nmoe_train.checkpoint.folder import SavedTensors
from nmoe_train.errors import TrainError
from nmoe_train.model import Transformer
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.tensor import Cut
from nmoe_train.parallel import Layout

MOMENTS = ("exp_avg", "exp_avg_sq")
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_up|down)$")


def gather_state(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state on this rank by name; they share memory with the training."""
    return dict(_named_tensors(model, optimizer))


def state_boxes(model: Transformer) -> dict[str, Box]:
    """Which part of a whole tensor is here, by the names of `gather_state`, of those cut."""
    parameters = dict(model.named_parameters())
    return {
        f"{prefix}.{name}": _box(parameters[name], cut)
        for name, cut in model.cuts().items()
        for prefix in ("model", *(f"optimizer.{moment}" for moment in MOMENTS))
    }


def _box(tensor: Tensor, cut: Cut) -> Box:
    start, whole = [0] * tensor.ndim, list(tensor.shape)
    start[cut.dim], whole[cut.dim] = cut.start, cut.whole
    return Box(tuple(start), tuple(tensor.shape), tuple(whole))


def owned_state(
    state: Mapping[str, Tensor], layout: Layout, boxes: Mapping[str, Box] | None = None
) -> dict[str, Tensor]:
    """What of a rank's state it writes, so that every number is written once.

    Of the ranks that hold the same, in a pipeline stage, the first writes it.
    """
    cut = boxes or {}

    def first(name: str) -> bool:
        if EXPERT.search(name):
            return layout.writes_experts
        return layout.data_rank == 0 if name in cut else layout.stage_rank == 0

    return {name: tensor for name, tensor in state.items() if first(name)}


def restore_state(
    model: Transformer, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor], step: int
) -> None:
    """Copies saved tensors into the training, in place; reads what of them this rank holds.

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
    boxes = state_boxes(model)
    with torch.no_grad():
        for name, tensor in wanted.items():
            box = boxes.get(name) or whole_box(tuple(tensor.shape))
            shape = saved.shape(name) if isinstance(saved, SavedTensors) else saved[name].shape
            if tuple(shape) != box.whole:
                raise TrainError(
                    "E-CHECKPOINT-STATE",
                    f"{name} is {tuple(shape)} in the checkpoint and {box.whole} in the model",
                    "resume with the configuration that wrote the checkpoint",
                )
            part = saved.part if isinstance(saved, SavedTensors) else _part_of(saved)
            tensor.copy_(part(name, box))


def _part_of(tensors: Mapping[str, Tensor]) -> Callable[[str, Box], Tensor]:
    return lambda name, box: box.of(tensors[name])


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
