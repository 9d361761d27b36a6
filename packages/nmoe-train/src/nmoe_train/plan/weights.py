"""How many weights a rank of a stage uses, by which ranks hold the same, and what they cost it.

Counted on the parameters of the real model, made without memory.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from nmoe_train.config import Config
from nmoe_train.model import Transformer
from nmoe_train.model.box import Box
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.matrices import HiddenWeight, hidden_weights
from nmoe_train.model.tensor import TensorParallel
from nmoe_train.parallel import Layout

NUMBER = 4
"""Bytes of fp32."""


@dataclass(frozen=True)
class Weights:
    """Numbers of weights that a rank uses, by which ranks hold the same ones."""

    experts: int
    """Routed experts: held alike by the replicas of an expert."""
    cut: int
    """Dense, cut over tensor-parallel ranks: held alike by data-parallel ones."""
    whole: int
    """Dense, not cut: held alike by all ranks of a stage."""
    small: int
    """Of the whole ones, norms and routers, which FSDP leaves whole."""

    @property
    def all(self) -> int:
        """All of them."""
        return self.experts + self.cut + self.whole

    def sharded(self, layout: Layout) -> int:
        """Those of which FSDP keeps a rank's part."""
        dense = self.cut + self.whole - self.small
        return self.small + -(-dense // layout.dp) - (-self.experts // layout.expert_replicas)


class WeightCounter:
    """Counts what ranks of a layout hold of the layers of a stage."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        vocab_size: int,
        tensor: TensorParallel,
        expert_tensor: TensorParallel,
    ) -> None:
        self.config, self.layout = config, layout
        self.vocab_size, self.tensor, self.expert_tensor = vocab_size, tensor, expert_tensor
        self._models: dict[tuple[int, ...], Transformer] = {}

    def weights(self, layers: Sequence[int]) -> Weights:
        """All of them."""
        model = self._model(layers)
        return _count(model, dict(model.named_parameters()).keys())

    def moments(self, layers: Sequence[int]) -> float:
        """Bytes of the optimizer's moments: AdamW has two, Muon one of every hidden weight."""
        model = self._model(layers)
        every = _count(model, dict(model.named_parameters()).keys())
        total = 2 * self._held(every)
        if self.config.optimizer.name == "muon":
            total -= self._held(_count(model, hidden_weights(model).keys()))
        return NUMBER * total

    def matrices_sent(self, layers: Sequence[int]) -> float:
        """Bytes that a rank sends in a step so that matrices are whole where Muon works on them."""
        if self.config.optimizer.name != "muon":
            return 0.0
        weights = hidden_weights(self._model(layers))
        return NUMBER * sum(self._trade(name, weight) for name, weight in weights.items())

    def _held(self, weights: Weights) -> int:
        return weights.sharded(self.layout) if self.config.parallel.fsdp else weights.all

    def _trade(self, name: str, weight: HiddenWeight) -> float:
        """Numbers that a rank sends for the matrices in one weight, to their owners and back.

        Of p different parts on h ranks, those of all but the owner go there once, and everyone's
        comes back.
        """
        layout, numbers = self.layout, _numbers(weight.here)
        if STACKED_EXPERTS.search(name):
            copies, parts = layout.expert_replicas, layout.etp
            holders = copies * parts
        else:
            whole = weight.here.shape == weight.here.whole
            parts = layout.tp if any(_crosses(box, weight.here) for box in weight.matrices) else 1
            holders = layout.dp * (layout.tp if whole else parts)
            copies = layout.dp
        numbers *= parts
        if self.config.parallel.fsdp:
            parts *= copies
        return numbers * ((1 - 1 / parts) + (holders - 1) / parts) / holders

    def _model(self, layers: Sequence[int]) -> Transformer:
        """The part of the model that has these layers, without numbers."""
        key = tuple(layers)
        if key not in self._models:
            experts = self.layout.local_experts(self.config.model.moe.experts)
            with torch.device("meta"):
                self._models[key] = Transformer(
                    self.config.model,
                    self.vocab_size,
                    held=layers,
                    tensor=self.tensor,
                    expert_tensor=self.expert_tensor,
                    expert_parallel=ExpertOwner(experts),  # type: ignore[arg-type]  # all it asks
                )
        return self._models[key]


def _count(model: Transformer, names: Collection[str]) -> Weights:
    cuts = model.cuts()
    numbers = dict.fromkeys(("experts", "cut", "whole", "small"), 0)
    for name, parameter in model.named_parameters():
        if name in names:
            kind = "cut" if name in cuts else "whole"
            kind = "experts" if STACKED_EXPERTS.search(name) else kind
            numbers[kind] += parameter.numel()
            if "norm" in name or ".router." in name:
                numbers["small"] += parameter.numel()
    return Weights(**numbers)


def _crosses(matrix: Box, here: Box) -> bool:
    """Whether a part of a matrix is here, and not all of it."""
    common = matrix.overlap(here)
    return common is not None and common.shape != matrix.shape


def _numbers(box: Box) -> int:
    return torch.Size(box.shape).numel()


@dataclass(frozen=True)
class ExpertOwner:
    """A rank of an expert-parallel group, as far as a model without numbers asks."""

    local_experts: range

    @property
    def experts_local(self) -> int:
        """How many experts it has."""
        return len(self.local_experts)
