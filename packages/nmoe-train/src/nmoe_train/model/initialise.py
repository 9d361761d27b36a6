"""Initial weights: every tensor, and every expert, from its own named generator.

A weight depends on (seed, its name, its expert's number among all) alone, so any layout of ranks
starts from the same model; a rank that holds a part of a weight draws it whole and keeps its part.
Matrices are normal with `init_std`; those that write into the residual stream are scaled down by
sqrt(2 * layers) (GPT-2); norms are one, biases zero.
"""

import math
import re

import torch
from torch import Tensor

from nmoe_train.config import ModelConfig
from nmoe_train.model.tensor import Cut
from nmoe_train.model.transformer import Transformer
from nmoe_train.randomness import generator

STACKED_EXPERTS = re.compile(r"\.experts\.(gate_up|down)$")
WRITES_TO_RESIDUAL = re.compile(r"\.(output\.weight|down\.weight|down)$")


@torch.no_grad()
def initialise(model: Transformer, config: ModelConfig, seed: int) -> None:
    """Fills all parameters and buffers of a transformer in place."""
    residual_std = config.init_std / math.sqrt(2 * config.layers)
    cuts = model.cuts()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        std = residual_std if WRITES_TO_RESIDUAL.search(name) else config.init_std
        if STACKED_EXPERTS.search(name):
            for expert, weight in zip(model.local_experts, parameter, strict=True):
                part = weight.unflatten(0, (2, -1)) if name.endswith("gate_up") else weight
                _fill(part, model.expert_cut, std, seed, name, expert)
        else:
            _fill(parameter, cuts.get(name), std, seed, name)
    for buffer in model.buffers():
        buffer.zero_()


def _fill(
    weight: Tensor, cut: Cut | None, std: float, seed: int, name: str, *counters: int
) -> None:
    """Draws a weight of which `cut` is here; None for all of it."""
    shape = list(weight.shape)
    if cut is not None:
        shape[cut.dim] = cut.whole
    draw = torch.randn(shape, generator=generator(seed, "init", name, *counters))
    weight.copy_((draw if cut is None else cut.of(draw)) * std)
