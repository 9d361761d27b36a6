"""The state of a training by name: what a checkpoint holds, whatever the layout.

`model.<parameter>` is the fp32 master weight, `optimizer.<moment>.<parameter>` its moments. Stacked
experts are taken apart, one tensor an expert (`model.layers.3.moe.experts.17.down`, by its number
among all experts), so that a rank reads what it needs however experts are spread. Gate and up are
apart there, [2, I, H], so that a part of the width is a box of it, too. Of what is cut over ranks
each has a box, whose place in the whole tensor is known.
"""

import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nmoe_train.checkpoint.folder import SavedTensors
from nmoe_train.errors import TrainError
from nmoe_train.model import Transformer
from nmoe_train.model.box import Box, held_box, whole_box
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.matrices import stack_box
from nmoe_train.model.tensor import Cut, local
from nmoe_train.parallel import Layout

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Of any optimizer; each weight has those that its group says."""
LAYER = re.compile(r"\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_up|down)$")


def gather_state(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state on this rank by name; they share memory with the training."""
    return dict(_named_tensors(model, optimizer))


@dataclass(frozen=True)
class Place:
    """Of a tensor that ranks have in parts: which part is here, and over whom it is cut."""

    box: Box | None
    """None for an expert that is here whole, though its replicas elsewhere have other ones."""
    over_tensor: bool
    """Whether the ranks of the tensor-parallel group have different parts."""
    over_data: bool
    """Whether the replicas have different parts."""


def state_places(model: Transformer) -> dict[str, Place]:
    """Places by the names of `gather_state`; a tensor without one is here as a whole."""
    cuts = model.cuts()
    return {
        f"{prefix}.{part}": place
        for name, parameter in model.named_parameters()
        for part, _, place in _apart(model, name, parameter, cuts.get(name))
        if place is not None
        for prefix in ("model", *(f"optimizer.{moment}" for moment in MOMENTS))
    }


def state_boxes(model: Transformer) -> dict[str, Box]:
    """Which part of a whole tensor is here, by the names of `gather_state`, of those cut."""
    places = state_places(model)
    return {name: place.box for name, place in places.items() if place.box is not None}


def owned_state(
    state: Mapping[str, Tensor],
    layout: Layout,
    places: Mapping[str, Place] | None = None,
    copies: Collection[str] = (),
) -> dict[str, Tensor]:
    """What of a rank's state it writes, so that every number is written once.

    Of the ranks that hold the same, in a pipeline stage, the first writes it. `copies` are names of
    parameters that another stage writes.
    """
    whole = Place(None, over_tensor=False, over_data=False)

    def first(name: str) -> bool:
        if any(name.endswith(f".{copy}") for copy in copies):
            return False
        place = (places or {}).get(name, whole)
        if EXPERT.search(name):
            return place.over_data or layout.writes_experts
        return (place.over_tensor or layout.tp_rank == 0) and (
            place.over_data or layout.data_rank == 0
        )

    return {name: tensor for name, tensor in state.items() if tensor.numel() and first(name)}


def restore_state(
    model: Transformer, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor], step: int
) -> None:
    """Copies saved tensors into the training, in place; reads what of them this rank holds.

    Raises TrainError `E-CHECKPOINT-STATE` when names or shapes are not those of this training.
    """
    materialise_moments(model, optimizer, step)
    wanted = gather_state(model, optimizer)
    here = {name for name in saved if not _is_elsewhere(name, model, wanted)}
    odd = sorted(wanted.keys() ^ here)
    if odd:
        raise TrainError(
            "E-CHECKPOINT-STATE",
            f"checkpoint and model differ in {len(odd)} tensors, {odd[0]} among them",
            "resume with the configuration that wrote the checkpoint",
        )
    places = state_places(model)
    with torch.no_grad():
        for name, tensor in wanted.items():
            place = places.get(name)
            box = place.box if place is not None else None
            box = box or whole_box(tuple(tensor.shape))
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


def _is_elsewhere(name: str, model: Transformer, here: Container[str]) -> bool:
    """Whether a tensor is one of this model that another rank holds: of a layer, or an expert."""
    config = model.config
    layer, expert = LAYER.search(name), EXPERT.search(name)
    if layer is None:
        ends = ["embedding.weight", "norm.weight"]
        ends += [] if config.tie_embeddings else ["head.weight"]
        parameter = ".".join(name.split(".")[-2:])
        return parameter in ends and parameter not in dict(model.named_parameters())
    if int(layer[1]) not in model.layers:
        return int(layer[1]) < config.layers
    return expert is not None and name not in here and int(expert[1]) < config.moe.experts


def _named_tensors(
    model: Transformer, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in model.named_buffers():
        yield f"model.{name}", buffer
    cuts = model.cuts()
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        tensors = {"model": parameter.detach()}
        tensors |= {f"optimizer.{m}": moments[m] for m in MOMENTS if m in moments}
        for part, index, _ in _apart(model, name, parameter, cuts.get(name)):
            for prefix, tensor in tensors.items():
                yield f"{prefix}.{part}", _of_expert(name, local(tensor), index)


def _of_expert(name: str, here: Tensor, index: int | None) -> Tensor:
    """One expert of a stack, with gate and up apart; all of what is none."""
    if index is None:
        return here
    return here[index].unflatten(0, (2, -1)) if name.endswith("gate_up") else here[index]


def _apart(
    model: Transformer, name: str, parameter: Tensor, cut: Cut | None
) -> Iterator[tuple[str, int | None, Place | None]]:
    """Names under which a parameter is saved, each with its index in a stack of experts here."""
    sharded = isinstance(parameter, DTensor)
    if not STACKED_EXPERTS.search(name):
        place = None
        if cut is not None or sharded:
            place = Place(held_box(parameter, cut), over_tensor=cut is not None, over_data=sharded)
        yield name, None, place
        return
    stack, _, matrix = name.rpartition(".")
    here = stack_box(model, name, parameter)
    box = Box(here.start[1:], here.shape[1:], here.whole[1:])
    place = None
    if sharded or box.shape != box.whole:
        within = None if box.shape == box.whole else box
        place = Place(within, over_tensor=model.expert_cut is not None, over_data=sharded)
    for index in range(here.shape[0]):
        yield f"{stack}.{here.start[0] + index}.{matrix}", index, place


def materialise_moments(model: Transformer, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gives every parameter the optimizer state that it has after `step` steps, to be filled."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments: dict[str, Tensor] = {
                moment: torch.zeros_like(parameter, memory_format=torch.preserve_format)
                for moment in group["moments"]
            }
            counter = torch.tensor(float(step), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": counter, **moments}
