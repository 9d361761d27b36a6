"""How many weights a rank of a stage uses, by which ranks hold the same, and what they cost it.

Counted on the parameters of the real model, made without memory.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from nmoe_train.config import Config
from nmoe_train.model import Transformer
from nmoe_train.model.initialise import STACKED_EXPERTS
from nmoe_train.model.matrices import hidden_weights
from nmoe_train.model.tensor import TensorParallel
from nmoe_train.parallel import Layout
from nmoe_train.parallel.fsdp import is_small
from nmoe_train.parallel.reduction import BUCKET_NUMBERS
from nmoe_train.plan.matrices import NUMBER, Spread, sent_bytes, spread, update_bytes


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
        return sent_bytes(self._matrices(layers))

    def update(self, layers: Sequence[int]) -> float:
        """Most bytes that a step takes once gradients are made: to add them, or for Muon."""
        cuda = self.config.run.device != "cpu"
        return max(self._bucket(layers), update_bytes(self._matrices(layers), cuda=cuda))

    def _matrices(self, layers: Sequence[int]) -> Mapping[Spread, int]:
        if self.config.optimizer.name != "muon":
            return {}
        return spread(self._model(layers), self.layout, sharded=self.config.parallel.fsdp)

    def _bucket(self, layers: Sequence[int]) -> float:
        """Bytes of the gradients that travel together; what FSDP adds it adds in the backward."""
        layout, sharded = self.layout, self.config.parallel.fsdp
        model = self._model(layers)
        cuts, gradients = model.cuts(), dict[str, list[int]]()
        for name, parameter in model.named_parameters():
            kind, ranks = "whole", layout.stage_ranks
            if STACKED_EXPERTS.search(name):
                kind, ranks = "experts", 1 if sharded else layout.expert_replicas
            elif name in cuts:
                kind, ranks = "cut", 1 if sharded else layout.dp
            elif sharded and not is_small(name):
                kind, ranks = "sharded", layout.tp
            if ranks > 1:
                share = layout.dp if kind == "sharded" else 1
                gradients.setdefault(kind, []).append(-(-parameter.numel() // share))
        buckets = (max(min(sum(some), BUCKET_NUMBERS), *some) for some in gradients.values())
        return NUMBER * max(buckets, default=0)

    def _held(self, weights: Weights) -> int:
        return weights.sharded(self.layout) if self.config.parallel.fsdp else weights.all

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
            if is_small(name):
                numbers["small"] += parameter.numel()
    return Weights(**numbers)


@dataclass(frozen=True)
class ExpertOwner:
    """A rank of an expert-parallel group, as far as a model without numbers asks."""

    local_experts: range

    @property
    def experts_local(self) -> int:
        """How many experts it has."""
        return len(self.local_experts)
