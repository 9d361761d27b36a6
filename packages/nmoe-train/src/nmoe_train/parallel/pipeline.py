"""Pipeline parallelism at run time: a rank carries out its stage's plan, part by part.

The layers are cut into P * C parts (`split`), of which stage s holds parts s, P + s, ... A plan
(`schedule`) says in which order it takes the micro-batches forward and backward; states and their
gradients travel between neighbours as checked messages (`messages`). Every rank of a share reads
the same sequences from the loader, so that tokens, documents and targets need not travel. A part's
own losses (balancing, z-loss; cross-entropy in the last) join its backward, beside the gradient
that comes from the next part.

Without a pipeline this is one stage that holds all layers, and takes each micro-batch forward and
backward in turn. Letters: P stages, C chunks of a stage.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmoe_train.config import Config
from nmoe_train.data import Step
from nmoe_train.model import ModelOutput, Transformer
from nmoe_train.model.costs import embedding_cost, head_cost, layer_cost
from nmoe_train.model.deferred import WeightQueue, deferring
from nmoe_train.model.tensor import local
from nmoe_train.parallel.fsdp import last_backward
from nmoe_train.parallel.groups import ALONE, Groups
from nmoe_train.parallel.messages import Direction, Header, Links, open_links
from nmoe_train.parallel.schedule import (
    Action,
    Kind,
    ScheduleName,
    StagePlan,
    forward_plan,
    make_plan,
)
from nmoe_train.parallel.split import given_split, split_layers

Losses = Callable[[ModelOutput, Step], Tensor]
"""Notes what a part's forward gave, and returns the loss that its backward starts from."""

Timed = Callable[[str], AbstractContextManager[None]]
"""A context for a named stage of the work, which may note how long it took."""


def part_layers(config: Config, vocab_size: int, stages: int) -> list[range]:
    """The layers of every part of the model, in order."""
    model, pipeline = config.model, config.parallel.pipeline
    if stages == 1:
        return [range(model.layers)]
    if pipeline.split is not None:
        return given_split(pipeline.split)
    return split_layers(
        [layer_cost(model, number, config.train.seq_len) for number in range(model.layers)],
        embedding_cost(model, vocab_size),
        head_cost(model, vocab_size),
        stages * pipeline.chunks,
    )


def held_layers(parts: Sequence[range], stage: int, stages: int) -> list[int]:
    """Numbers of the layers that a stage holds."""
    return [number for part in parts[stage::stages] for number in part]


@dataclass
class _InFlight:
    """A micro-batch between its forward and its last gradient, in one part."""

    inputs: Tensor
    hidden: Tensor
    loss: Tensor
    weights: WeightQueue | None


@dataclass
class _Pass:
    """What one pass of micro-batches over the stage has in common."""

    number: int
    """The step, or in an evaluation the number of evaluations before it."""
    micros: Sequence[Step]
    states: Direction
    timed: Timed
    held: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    """By micro-batch and chunk."""


class Pipeline:
    """One rank's stage and its links to its neighbours; `parts` are the layers of all parts.

    All ranks of the run make it together. Its methods raise TrainError `E-PEER` when a neighbour is
    gone, and `E-PIPELINE-MESSAGE` when one is out of step.
    """

    def __init__(
        self,
        model: Transformer,
        groups: Groups = ALONE,
        parts: Sequence[range] | None = None,
        *,
        schedule: ScheduleName = "1f1b",
        deadline_s: float = 600.0,
        attempt: int = 0,
    ) -> None:
        self.model, self._groups, self._schedule = model, groups, schedule
        self._stages, self._stage = groups.layout.pp, groups.layout.pp_rank
        self._parts = [range(model.config.layers)] if parts is None else list(parts)
        self._chunks, left = divmod(len(self._parts), self._stages)
        assert left == 0
        self._attempt, self._evaluations = attempt, 0
        self._links = Links()
        if self._stages > 1:
            self._links = open_links(
                groups,
                model.device,
                deadline_s,
                ring=self._chunks > 1,
                ends=model.config.tie_embeddings,
            )

    @property
    def has_output(self) -> bool:
        """Whether the last part, which makes the loss, is here."""
        return self._stage == self._stages - 1

    def train(self, step: int, micros: Sequence[Step], losses: Losses, timed: Timed) -> None:
        """Adds the gradients of all micro-batches to the weights' `grad`.

        `losses` hears of each micro-batch once for every part that is here.
        """
        plan = make_plan(self._schedule, self._stages, len(micros), self._chunks)
        splits = any(action.kind is Kind.WEIGHT for action in plan[self._stage])
        going = _Pass(step, micros, Direction.STATES, timed)
        self._expect(plan, going)
        for action in plan[self._stage]:
            key = (action.micro, action.chunk)
            if action.kind is Kind.FORWARD:
                weights = WeightQueue() if splits else None
                going.held[key] = self._forward(action, going, losses, weights)
            elif action.kind is Kind.BACKWARD:
                self._backward(action, going)
            else:
                with timed("weights"):
                    queue = going.held.pop(key).weights
                    assert queue is not None
                    queue.run()
        assert not going.held
        self._links.finish()
        self._add_tied()

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Step], use: Callable[[Tensor, Step], None]) -> None:
        """Takes micro-batches through all parts, forward only.

        On the ranks that have the output, `use` gets the states of each before the projection.
        """
        plan = forward_plan(self._stages, len(micros), self._chunks)
        going = _Pass(self._evaluations, micros, Direction.EVALUATION, lambda _: nullcontext())
        self._evaluations += 1
        self._expect(plan, going)
        for action in plan[self._stage]:
            micro = micros[action.micro]
            inputs = self._inputs(action, going)
            with self._groups.among_peers("in an evaluation"):
                output = self._run_part(action, going, inputs)
                if self._part(action) == len(self._parts) - 1:
                    use(output.hidden_BSH, micro)
        self._links.finish()

    def _forward(
        self, action: Action, going: _Pass, losses: Losses, weights: WeightQueue | None
    ) -> _InFlight:
        inputs = self._inputs(action, going)
        with (
            going.timed("forward"),
            self._groups.among_peers("in the forward pass"),
            deferring(weights),
        ):
            if inputs.is_floating_point():
                inputs.requires_grad_()
            output = self._run_part(action, going, inputs)
            loss = losses(output, going.micros[action.micro])
        return _InFlight(inputs, output.hidden_BSH, loss, weights)

    def _backward(self, action: Action, going: _Pass) -> None:
        """Gradients of a part; its first half of them where weights have actions of their own."""
        key = (action.micro, action.chunk)
        flight, part = going.held[key], self._part(action)
        ends: list[tuple[Tensor, Tensor | None]] = []
        if flight.loss.requires_grad:
            ends.append((flight.loss, None))
        if part < len(self._parts) - 1:
            inbox = self._links.gradients_in
            assert inbox is not None
            with going.timed("bubble"):
                ends.append((flight.hidden, inbox.receive(self._gradient(action, part, going))))
        with (
            going.timed("backward"),
            self._groups.among_peers("in the backward pass"),
            deferring(flight.weights),
        ):
            # A chunk's layers see each micro-batch once, in order.
            last_backward(self.model, action.micro == len(going.micros) - 1)
            tensors, gradients = zip(*ends, strict=True)
            torch.autograd.backward(tensors, gradients)
        if part > 0:
            outbox, grad = self._links.gradients_out, flight.inputs.grad
            assert outbox is not None and grad is not None
            outbox.send(self._gradient(action, part - 1, going), grad)
        if flight.weights is None:
            del going.held[key]
        else:
            # The graph is gone; what is left for the weights waits in the queue.
            flight.inputs = flight.hidden = flight.loss = flight.loss.detach()

    def _add_tied(self) -> None:
        """Adds the two gradients of a tied embedding, which the first and the last stage hold."""
        if self._links.ends is not None:
            assert self.model.embedding is not None
            grad = self.model.embedding.weight.grad
            assert grad is not None
            what = "gradients of the tied embedding"
            self._groups.sum_within_(local(grad), self._links.ends, what)

    def _inputs(self, action: Action, going: _Pass) -> Tensor:
        """Tokens for the first part, the states of the part before for the others."""
        part = self._part(action)
        if part == 0:
            return going.micros[action.micro].inputs_BS
        assert self._links.states_in is not None
        with going.timed("bubble"):
            return self._links.states_in.receive(self._states(action, part, going))

    def _run_part(self, action: Action, going: _Pass, inputs: Tensor) -> ModelOutput:
        """Runs a part's layers, and sends the states on."""
        part, micro = self._part(action), going.micros[action.micro]
        output = self.model.part(inputs, micro.documents_BS, self._parts[part])
        if part < len(self._parts) - 1:
            assert self._links.states_out is not None
            header = self._states(action, part + 1, going)
            self._links.states_out.send(header, output.hidden_BSH.detach())
        return output

    def _expect(self, plan: Sequence[StagePlan], going: _Pass) -> None:
        """Tells the mailboxes all that neighbours will send in this pass, in their order."""
        last = len(self._parts) - 1
        before, after = (self._stage - 1) % self._stages, (self._stage + 1) % self._stages
        if self._links.states_in is not None:
            sent = [a for a in plan[before] if a.kind is Kind.FORWARD]
            places = [(a, a.chunk * self._stages + before) for a in sent]
            self._links.states_in.expect(
                [self._states(a, part + 1, going) for a, part in places if part < last]
            )
        if self._links.gradients_in is not None:
            sent = [a for a in plan[after] if a.kind is Kind.BACKWARD]
            places = [(a, a.chunk * self._stages + after) for a in sent]
            self._links.gradients_in.expect(
                [self._gradient(a, part - 1, going) for a, part in places if part > 0]
            )

    def _part(self, action: Action) -> int:
        return action.chunk * self._stages + self._stage

    def _states(self, action: Action, part: int, going: _Pass) -> Header:
        return self._header(action, part, going, going.states)

    def _gradient(self, action: Action, part: int, going: _Pass) -> Header:
        return self._header(action, part, going, Direction.GRADIENT)

    def _header(self, action: Action, part: int, going: _Pass, direction: Direction) -> Header:
        """The header of a message that a part takes."""
        sequences, positions = going.micros[action.micro].documents_BS.shape
        tensor = self.model.tensor
        shape = (sequences, tensor.lengths(positions)[tensor.rank], self.model.config.width)
        place = (self._attempt, going.number, action.micro, part)
        return Header(*place, direction, shape, self.model.dtype)
