"""A dry run of a layout: what each stage's ranks hold, keep and send, before anything is started.

One process stands for all: the groups are made over a fake backend, layers' footprints are
measured on the real code (`footprint`), and the pipeline's plan is carried out by the simulator,
which proves that it ends. Ranks of a stage hold the same, but for which experts and which part of a
weight; where something does not divide, the figures are those of the rank with the most. Time is
counted in FLOPs, so that the bubble is a share and not seconds.

Letters: P stages, M micro-batches of a step, T tokens of a micro-batch on a rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

import torch
import torch.distributed as dist
from nmoe_data.tokenizer import load_tokenizer
from nmoe_kernels.rdep.memory import lay_out
from nmoe_kernels.rdep.transports import Shape
from torch.testing._internal.distributed.fake_pg import FakeStore

from nmoe_train.config import Config
from nmoe_train.model.costs import (
    attention_weights,
    expert_weights,
    head_cost,
    layer_cost,
)
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import make_groups
from nmoe_train.parallel.messages import POSTED_AHEAD
from nmoe_train.parallel.pipeline import held_layers, part_layers
from nmoe_train.parallel.schedule import Costs, Kind, StagePlan, make_plan, simulate
from nmoe_train.plan.footprint import (
    DTYPES,
    CountingTensor,
    expert_casts,
    head_footprint,
    layer_footprint,
    mask_bytes,
)
from nmoe_train.plan.weights import WeightCounter, Weights

MASTER, GRADIENT = 4, 4
"""Bytes of a weight's fp32 master, and of its gradient."""


@dataclass(frozen=True)
class StageReport:
    """What each rank of a stage holds, in bytes, and sends in a step."""

    stage: int
    ranks: range
    layers: list[int]
    experts: int
    """Routed experts of each Mixture-of-Experts layer on a rank."""
    weights: Weights
    memory: dict[str, float]
    """At the height of a forward and backward pass, by what it is for."""
    update: float
    """Of all memory, at the height of what follows: adding gradients, updating weights."""
    in_flight: int
    """Most runs of a micro-batch through a part whose activations are held at one time."""
    sent: dict[str, float]
    """Bytes that a rank sends in a step, by kind."""

    @property
    def total(self) -> float:
        """Most bytes of memory."""
        return max(sum(self.memory.values()), self.update)


@dataclass(frozen=True)
class DryRun:
    """All stages of a layout."""

    layout: Layout
    micro_batches: int
    schedule: str
    sharded: bool
    """Whether FSDP cuts what replicas would hold alike."""
    bubble: float
    """Share of the stages' time in which they wait for each other."""
    stages: list[StageReport]

    @property
    def balance(self) -> float:
        """Memory of the fullest rank over that of the mean."""
        totals = [stage.total for stage in self.stages]
        return max(totals) * len(totals) / sum(totals)


def dry_run(config: Config, layout: Layout, vocab_size: int) -> DryRun:
    """Reports on a layout that `current_layout` has checked.

    Raises PlanError if the schedule could not be carried out, which would be a fault of nmoe-train.
    """
    return _DryRun(config, layout, vocab_size).report()


def check_groups(layout: Layout) -> dict[str, int]:
    """Makes the groups of a layout's first and last rank over a backend that sends nothing.

    Returns how many ranks are in each. No group may be joined yet.
    """
    sizes: dict[str, int] = {}
    for rank in (0, layout.ranks - 1) if layout.ranks > 1 else ():
        place = replace(layout, rank=rank)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
        try:
            groups = make_groups(place, torch.device("cpu"))
            sizes = {name: group.size() for name, group in groups.items()}
        finally:
            dist.destroy_process_group()
    return sizes


def planned_vocabulary(config: Config) -> int:
    """Rows of the embedding that a run would have, as far as is known before its data is made.

    Raises nmoe_data's DataError where a tokenizer is named that cannot be read.
    """
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    made, spec = config.data_dir / "tokenizer.json", config.data.tokenizer
    if not made.exists() and spec.startswith("bpe:"):
        return int(spec.removeprefix("bpe:"))
    return load_tokenizer(made if made.exists() else spec).vocab_size


class _DryRun:
    def __init__(self, config: Config, layout: Layout, vocab_size: int) -> None:
        self.config, self.layout, self.vocab_size = config, layout, vocab_size
        self.model, train = config.model, config.train
        self.tensor = tensor = CountingTensor(layout.tp)
        expert_tensor = CountingTensor(layout.etp)
        self.counter = WeightCounter(config, layout, vocab_size, tensor, expert_tensor)
        self.itemsize = DTYPES[config.precision.dtype].itemsize
        share = train.batch_size // layout.dp
        self.sequences = train.micro_batch_size or share
        self.micro_batches = share // self.sequences
        self.tokens = self.sequences * max(tensor.lengths(train.seq_len))
        self.expert_tokens = self.tokens * layout.etp
        self.parts = part_layers(config, vocab_size, layout.pp)
        self.chunks = len(self.parts) // layout.pp
        self.schedule = config.parallel.pipeline.schedule if layout.pp > 1 else "1f1b"
        self.plan = make_plan(self.schedule, layout.pp, self.micro_batches, self.chunks)
        self.recompute = train.recompute == "layer"
        kinds = {self._is_moe(number): number for number in range(self.model.layers)}
        self.footprints = {
            moe: layer_footprint(config, number, tensor, expert_tensor)
            for moe, number in kinds.items()
        }
        self.head = head_footprint(config, vocab_size, tensor)

    def report(self) -> DryRun:
        costs = [self._part_costs(number) for number in range(len(self.parts))]
        simulation = simulate(self.plan, costs)
        stages = [
            self._stage(stage, simulation.in_flight[stage]) for stage in range(self.layout.pp)
        ]
        return DryRun(
            self.layout,
            self.micro_batches,
            self.schedule,
            self.config.parallel.fsdp,
            simulation.bubble,
            stages,
        )

    def _stage(self, stage: int, in_flight: int) -> StageReport:
        layout = self.layout
        layers = held_layers(self.parts, stage, layout.pp)
        weights = self.counter.weights(layers)
        first = stage * layout.stage_ranks
        moe = any(self._is_moe(number) for number in layers)
        memory = self._memory(stage, layers, weights)
        return StageReport(
            stage=stage,
            ranks=range(first, first + layout.stage_ranks),
            layers=layers,
            experts=len(layout.local_experts(self.model.moe.experts)) if moe else 0,
            weights=weights,
            memory=memory,
            update=self._update(layers, weights, memory),
            in_flight=in_flight,
            sent={
                kind: bytes for kind, bytes in self._sent(stage, layers, weights).items() if bytes
            },
        )

    def _update(
        self, layers: Sequence[int], weights: Weights, memory: Mapping[str, float]
    ) -> float:
        """Bytes of all memory once the passes of a step are over."""
        kept = sum(memory[kind] for kind in ("weights", "moments", "buffers"))
        return kept + GRADIENT * self._held(weights) + self.counter.update(layers)

    def _held(self, weights: Weights) -> int:
        return weights.sharded(self.layout) if self.config.parallel.fsdp else weights.all

    def _memory(self, stage: int, layers: Sequence[int], weights: Weights) -> dict[str, float]:
        held = self._held(weights)
        gathered = 0.0
        gradients = held
        if self.config.parallel.fsdp:
            # Two layers' weights at a time, and those of the root from the embedding to the loss.
            ends = self._end_weights(stage) // self.layout.tp
            layer = max((self.counter.weights([number]).all for number in layers), default=0)
            gathered = (ends + 2 * layer) * self.itemsize
            # Between micro-batches, what is not added over ranks yet is whole.
            gradients = weights.all if self.micro_batches > 1 else held
        return {
            "weights": MASTER * held,
            "gathered": gathered,
            "gradients": GRADIENT * gradients,
            "moments": self.counter.moments(layers),
            "activations": self._peak_activations(stage),
            "working": self._working(stage, layers),
            "buffers": self._buffers(layers),
        }

    def _end_weights(self, stage: int) -> int:
        """Weights of the embedding and the output projection that are on a stage."""
        matrix = self.vocab_size * self.model.width
        return matrix * ((stage == 0) + (stage == self.layout.pp - 1))

    def _peak_activations(self, stage: int) -> float:
        """Most bytes of activations while the stage carries out its plan.

        Where gradients of weights wait, all of a micro-batch is taken to be kept until they are
        made, though only their part is.
        """
        actions: StagePlan = self.plan[stage]
        last = Kind.WEIGHT if self.schedule == "zero-bubble" else Kind.BACKWARD
        part_bytes = [
            self._part_activations(chunk * self.layout.pp + stage) for chunk in range(self.chunks)
        ]
        held = most = 0.0
        for action in actions:
            if action.kind is Kind.FORWARD:
                held += part_bytes[action.chunk]
            elif action.kind is last:
                held -= part_bytes[action.chunk]
            most = max(most, held)
        return most

    def _part_activations(self, part: int) -> float:
        """Bytes that a micro-batch keeps in one part."""
        layers = self.parts[part]
        total = float(self.sequences * mask_bytes(self.config))
        for number in layers:
            if self.recompute:
                total += self.tokens * self.model.width * self.itemsize
            else:
                total += self._layer_activations(self._is_moe(number))
        if part == len(self.parts) - 1:
            total += self.head.per_sequence * self.sequences + self.head.fixed
        return total

    def _layer_activations(self, moe: bool) -> float:
        """Bytes that a micro-batch keeps in a layer that is not computed again."""
        footprint = self.footprints[moe]
        total = footprint.per_sequence * self.sequences
        if self.config.parallel.fsdp:
            # Gathered weights have the format already, and are given up after the forward.
            return total + self._rows() * self.model.width * self.itemsize * moe
        total += footprint.fixed
        if moe:
            total -= expert_casts(self.config) / self.layout.etp * (1 - 1 / self.layout.ep)
            if self.layout.ep > 1:
                total += self._rows() * self.model.width * self.itemsize
        return total

    def _working(self, stage: int, layers: Sequence[int]) -> float:
        """Bytes of what comes and goes: a layer computed again, a chunk of logits, rows."""
        again = max(self._layer_activations(self._is_moe(number)) for number in layers)
        rows = 2 * self._rows() * self.model.width * self.itemsize if self.layout.ep > 1 else 0
        total = float(rows) + (again if self.recompute else 0.0)
        if stage == self.layout.pp - 1:
            chunk = min(self.config.train.loss_chunk, self.sequences * self.config.train.seq_len)
            # Logits in their format and in fp32, their log-probabilities and their gradient.
            total += chunk * self.vocab_size / self.layout.tp * (2 * self.itemsize + 8)
        return total

    def _buffers(self, layers: Sequence[int]) -> float:
        """Bytes of mailboxes between stages, and of memory that peers write rows to."""
        total = 0.0
        if self.layout.pp > 1:
            total += 2 * (POSTED_AHEAD + 1) * self.tokens * self.model.width * self.itemsize
        rdep = self.config.parallel.rdep
        if self.layout.ep > 1 and rdep.transport in ("p2p", "nvshmem") and layers:
            shape = Shape(
                rank=0,
                ranks=self.layout.ep,
                experts=self.model.moe.experts,
                slots=self.model.moe.top_k,
                width=self.model.width,
                tokens_max=self.expert_tokens,
                dtype=DTYPES[self.config.precision.dtype],
                device=torch.device("cpu"),
                capacity=None,
                deadline_s=rdep.deadline_s,
            )
            total += lay_out(shape).size
        return total

    def _rows(self) -> float:
        """Rows that a rank's experts get of a layer and micro-batch: one a token and owner."""
        moe, ep = self.model.moe, self.layout.ep
        others = comb(moe.experts - moe.experts // ep, moe.top_k) / comb(moe.experts, moe.top_k)
        return self.expert_tokens * ep * (1 - others)

    def _sent(self, stage: int, layers: Sequence[int], weights: Weights) -> Mapping[str, float]:
        """Bytes that a rank sends in a step, by kind. Norms, counts and checks are left out."""
        layout, forwards = self.layout, 2 if self.recompute else 1
        moe = [number for number in layers if self._is_moe(number)]
        state = self.tokens * self.model.width * self.itemsize
        ends = (stage > 0) + (stage < layout.pp - 1)
        crossings = self.chunks * 2 - (2 - ends)
        tensor = sum(self.footprints[self._is_moe(number)].sent for number in layers)
        head = self.head.sent if stage == layout.pp - 1 else 0.0
        rows = self._rows() * self.model.width * self.itemsize * (layout.ep - 1) / layout.ep
        # There and back, forward and backward; there and back once more where it is made again.
        trips = 2 * (forwards + 1)
        return {
            "tensor": self.micro_batches * self.sequences * (tensor * (forwards + 1) + head * 2),
            "experts": self.micro_batches * len(moe) * trips * rows,
            "pipeline": self.micro_batches * crossings * state if layout.pp > 1 else 0.0,
            "gradients": self._gradients_sent(weights),
            "weights": self._weights_sent(weights, forwards),
            "matrices": self.counter.matrices_sent(layers),
        }

    def _gradients_sent(self, weights: Weights) -> float:
        """Bytes of summing gradients: an all-reduce sends twice what a reduce-scatter does."""
        layout, once = self.layout, 1 if self.config.parallel.fsdp else 2
        dense = weights.cut + weights.whole - weights.small
        total = once * _around(weights.experts, layout.expert_replicas)
        if self.config.parallel.fsdp:
            total += _around(dense, layout.dp) + 2 * _around(weights.small, layout.stage_ranks)
            total += 2 * _around((weights.whole - weights.small) // layout.dp, layout.tp)
        else:
            total += 2 * _around(weights.cut, layout.dp)
            total += 2 * _around(weights.whole, layout.stage_ranks)
        return GRADIENT * total

    def _weights_sent(self, weights: Weights, forwards: int) -> float:
        """Bytes of gathering weights for every forward and backward."""
        if not self.config.parallel.fsdp:
            return 0.0
        dense = weights.cut + weights.whole - weights.small
        once = _around(dense, self.layout.dp) + _around(
            weights.experts, self.layout.expert_replicas
        )
        return self.micro_batches * 2 * once * self.itemsize

    def _part_costs(self, part: int) -> Costs:
        """FLOPs of a token in a part; only linear maps make their weights' gradients apart."""
        layers = self.parts[part]
        forward = sum(
            layer_cost(self.model, number, self.config.train.seq_len).flops for number in layers
        )
        if part == len(self.parts) - 1:
            forward += head_cost(self.model, self.vocab_size).flops
        apart = sum(self._linear_flops(number) for number in layers)
        return Costs(forward, 2 * forward - apart, apart)

    def _linear_flops(self, number: int) -> float:
        """FLOPs of a token in the linear maps of a layer."""
        model, matrices = self.model, attention_weights(self.model)[0]
        if not self._is_moe(number):
            return 2.0 * (matrices + 3 * model.width * model.dense_width)
        return 2.0 * (matrices + model.moe.shared_experts * expert_weights(model))

    def _is_moe(self, number: int) -> bool:
        return number >= self.model.dense_layers


def _around(numbers: float, ranks: int) -> float:
    """Numbers that each of so many ranks sends when they gather, or reduce, in a ring."""
    return numbers * (ranks - 1) / ranks
