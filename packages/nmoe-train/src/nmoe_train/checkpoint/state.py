"""The state of a training by name: what a checkpoint holds, whatever the layout.

`model.<parameter>` is the fp32 master weight, `optimizer.<moment>.<parameter>` its moments. Stacked
experts are taken apart, one tensor an expert (`model.layers.3.moe.experts.17.down`), so that a rank
owns and reads whole tensors however experts are spread.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from nmoe_train.errors import TrainError
from nmoe_train.model.initialise import STACKED_EXPERTS

MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state by name; the tensors share memory with the training."""
    return dict(_named_tensors(model, optimizer))


def restore_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor], step: int
) -> None:
    """Copies saved tensors into the training, in place.

    Raises TrainError `E-CHECKPOINT-STATE` when names or shapes are not those of this training.
    """
    _materialise_moments(model, optimizer, step)
    wanted = gather_state(model, optimizer)
    if wanted.keys() != saved.keys():
        odd = sorted(wanted.keys() ^ saved.keys())
        raise TrainError(
            "E-CHECKPOINT-STATE",
            f"checkpoint and model differ in {len(odd)} tensors, {odd[0]} among them",
            "resume with the configuration that wrote the checkpoint",
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            if tensor.shape != saved[name].shape:
                raise TrainError(
                    "E-CHECKPOINT-STATE",
                    f"{name} is {tuple(saved[name].shape)} in the checkpoint and "
                    f"{tuple(tensor.shape)} in the model",
                    "resume with the configuration that wrote the checkpoint",
                )
            tensor.copy_(saved[name])


def _named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in model.named_buffers():
        yield f"model.{name}", buffer
    for name, parameter in model.named_parameters():
        yield from _apart(f"model.{name}", parameter.detach())
        moments = optimizer.state.get(parameter, {})
        for moment in MOMENTS:
            if moment in moments:
                yield from _apart(f"optimizer.{moment}.{name}", moments[moment])


def _apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor under its name, or a stack of experts one by one under theirs."""
    if not STACKED_EXPERTS.search(name):
        yield name, tensor
        return
    stack, _, matrix = name.rpartition(".")
    for expert, weight in enumerate(tensor):
        yield f"{stack}.{expert}.{matrix}", weight


def _materialise_moments(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gives every parameter the optimizer state that it has after `step` steps, to be filled."""
    for parameter in model.parameters():
        moments: dict[str, Tensor] = {
            moment: torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for moment in MOMENTS
        }
        counter = torch.tensor(float(step), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {"step": counter, **moments}
