"""Tensors that travel between two neighbouring stages of a pipeline, each under a checked header.

A header says which attempt, step, micro-batch, part and direction a tensor belongs to, its shape
and format. The receiver knows what must come next and compares: a message that is left over,
repeated or out of turn is an error and never becomes a gradient. Headers travel between the CPUs;
the tensor behind one is looked at only once its header is right.

Headers are asked for before they are needed, tensors once their header is there, and sends wait for
nobody. A tensor is not asked for earlier: NCCL's kernel would wait for it on the GPU, and CUDA,
which loads other kernels when they are first used, may then wait for that one to end (CUDA's guide
on lazy loading). Gloo would close the connection on a tensor of another size, and the header be
lost. No two links of a stage share a group, as NCCL works off what a group is given in order: a
receive would hold up a send.
"""

import datetime
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe_train.errors import TrainError
from nmoe_train.parallel.groups import Groups
from nmoe_train.parallel.layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
MOST_DIMENSIONS = 4
HEADER_TAG, TENSOR_TAG = 0, 1
POSTED_AHEAD = 2
"""Headers that are waited for at one time: the next one, and the one after."""


class Direction(IntEnum):
    """What a message is for."""

    STATES = 0
    """States between two parts, forward."""
    GRADIENT = 1
    """Their gradient, backward."""
    EVALUATION = 2
    """States of a forward pass that no backward follows."""


@dataclass(frozen=True)
class Header:
    """What a message is."""

    attempt: int
    step: int
    """Of training; in an evaluation, the number of evaluations before it."""
    micro: int
    part: int
    """The part of the model that takes it."""
    direction: Direction
    shape: tuple[int, ...]
    dtype: torch.dtype

    def numbers(self) -> Tensor:
        """The header as int64, on the CPU."""
        padding = (0,) * (MOST_DIMENSIONS - len(self.shape))
        place = (self.attempt, self.step, self.micro, self.part, self.direction)
        return torch.tensor(
            (*place, DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding)
        )

    @staticmethod
    def read(numbers: Tensor) -> "Header | None":
        """The header of these numbers; None if they are none."""
        attempt, step, micro, part, direction, dtype, dimensions, *shape = numbers.tolist()
        if direction not in list(Direction) or not 0 <= dtype < len(DTYPES):
            return None
        return Header(
            *(attempt, step, micro, part, Direction(direction)),
            tuple(shape[:dimensions]),
            DTYPES[dtype],
        )

    def __str__(self) -> str:
        what = self.direction.name.lower()
        format = str(self.dtype).removeprefix("torch.")
        return (
            f"the {what} of micro-batch {self.micro} for part {self.part} in step {self.step} of "
            f"attempt {self.attempt}, {format} {list(self.shape)}"
        )


HEADER_NUMBERS = 7 + MOST_DIMENSIONS


class Outbox:
    """Sends to one rank in one direction; a tensor is kept until it is gone."""

    def __init__(self, groups: Groups, peer: int, link: dist.ProcessGroup) -> None:
        self._groups, self._peer, self._link = groups, peer, link
        self._leaving: deque[tuple[list[dist.Work], tuple[Tensor, Tensor]]] = deque()

    def send(self, header: Header, tensor: Tensor) -> None:
        """Starts to send; returns at once. Raises TrainError `E-PEER` when the peer is gone."""
        assert header.shape == tuple(tensor.shape) and header.dtype == tensor.dtype
        kept = (header.numbers(), tensor.contiguous())
        with self._groups.among_peers(_doing("sending to", self._peer)):
            works = [
                dist.isend(part, self._peer, self._link, tag)
                for part, tag in zip(kept, (HEADER_TAG, TENSOR_TAG), strict=True)
            ]
            while self._leaving and all(work.is_completed() for work in self._leaving[0][0]):
                self._leaving.popleft()
        self._leaving.append(([work for work in works if work is not None], kept))

    def finish(self) -> None:
        """Waits until everything is gone."""
        with self._groups.waiting(_doing("sending to", self._peer)):
            while self._leaving:
                works, _ = self._leaving.popleft()
                for work in works:
                    work.wait()


@dataclass
class _Posted:
    """A header that is waited for."""

    header: Header
    numbers: Tensor
    header_came: dist.Work


class Inbox:
    """Receives from one rank in one direction what is expected, in the order it is expected."""

    def __init__(
        self, groups: Groups, peer: int, link: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._groups, self._peer, self._link, self._device = groups, peer, link, device
        self._expected: Iterator[Header] = iter(())
        self._posted: deque[_Posted] = deque()

    def expect(self, headers: Sequence[Header]) -> None:
        """Says all that will come next, once the last of what came before was received."""
        assert not self._posted
        self._expected = iter(headers)
        with self._groups.among_peers(_doing("receiving from", self._peer)):
            for _ in range(POSTED_AHEAD):
                self._post()

    def receive(self, header: Header) -> Tensor:
        """The next message, which must be this one.

        Raises TrainError: `E-PIPELINE-MESSAGE` where it is another, `E-PEER` when the peer is gone.
        """
        posted = self._posted.popleft()
        assert posted.header == header, f"used in another order than sent: not {posted.header}"
        with self._groups.waiting(_doing("receiving from", self._peer)):
            posted.header_came.wait()
            if not torch.equal(posted.numbers, header.numbers()):
                raise self._stray(header, Header.read(posted.numbers))
            tensor = torch.empty(header.shape, dtype=header.dtype, device=self._device)
            self._receive(tensor, TENSOR_TAG).wait()
            self._post()
        return tensor

    def _post(self) -> None:
        header = next(self._expected, None)
        if header is None:
            return
        numbers = torch.empty(HEADER_NUMBERS, dtype=torch.int64)
        self._posted.append(_Posted(header, numbers, self._receive(numbers, HEADER_TAG)))

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        work = dist.irecv(tensor, self._peer, self._link, tag)
        assert work is not None
        return work

    def _stray(self, expected: Header, came: Header | None) -> TrainError:
        return TrainError(
            "E-PIPELINE-MESSAGE",
            f"rank {self._groups.layout.rank} expected from rank {self._peer} {expected}, and "
            f"there came {came or 'what is no message of a pipeline'}",
            "a rank is out of step or left over from another start: end all ranks, and run the "
            "same command again",
        )


def _doing(what: str, peer: int) -> str:
    return f"{what} rank {peer}, a stage before or after"


@dataclass(frozen=True)
class Links:
    """A stage's mailboxes; None at the ends of a pipeline that is no ring."""

    states_in: Inbox | None = None
    states_out: Outbox | None = None
    gradients_in: Inbox | None = None
    gradients_out: Outbox | None = None
    ends: dist.ProcessGroup | None = None
    """The first and the last stage, where this is one of them and they share weights."""

    def finish(self) -> None:
        """Waits until everything is sent."""
        for box in (self.states_out, self.gradients_out):
            if box is not None:
                box.finish()


def open_links(
    groups: Groups, device: torch.device, deadline_s: float, *, ring: bool, ends: bool
) -> Links:
    """Connects this stage with those before and after it; all ranks of the run call it together.

    In a `ring`, the last stage comes before the first. `ends`: the first and the last share
    weights. Neighbours wait `deadline_s` at most.
    """
    layout = groups.layout
    # Pair n is stage n and the one after it.
    pairs = range(layout.pp if ring else layout.pp - 1)
    links = _link_groups(layout, sorted({_colour(n, layout.pp) for n in pairs}), deadline_s)
    boxes: dict[str, Inbox | Outbox] = {}
    for name in ("states", "gradients"):
        for pair in pairs:
            couple = (pair, (pair + 1) % layout.pp)
            source, target = couple if name == "states" else couple[::-1]
            if layout.pp_rank not in couple:
                continue
            link = links[name, _colour(pair, layout.pp)]
            _greet(groups, link, layout.peer(source), layout.peer(target), device)
            if layout.pp_rank == target:
                boxes[f"{name}_in"] = Inbox(groups, layout.peer(source), link, device)
            else:
                boxes[f"{name}_out"] = Outbox(groups, layout.peer(target), link)
    tied = _end_group(layout, deadline_s) if ends else None
    return Links(**boxes, ends=tied)  # type: ignore[arg-type]  # the names say which they are


def _colour(pair: int, stages: int) -> int:
    """A number for a pair of neighbours that no other pair of the same stage has."""
    return 2 if pair == stages - 1 and stages % 2 else pair % 2


def _link_groups(
    layout: Layout, colours: list[int], deadline_s: float
) -> dict[tuple[str, int], dist.ProcessGroup]:
    """This rank's groups for links, by what travels and colour; every rank makes those of all."""
    timeout = datetime.timedelta(seconds=deadline_s)
    found = {}
    for place in range(layout.stage_ranks):
        ranks = [stage * layout.stage_ranks + place for stage in range(layout.pp)]
        for name in ("states", "gradients"):
            for colour in colours:
                link = dist.new_group(ranks, timeout=timeout)
                if place == layout.stage_rank:
                    assert isinstance(link, dist.ProcessGroup)
                    found[name, colour] = link
    return found


def _end_group(layout: Layout, deadline_s: float) -> dist.ProcessGroup | None:
    """The first and the last stage at this rank's place; None on those between."""
    found = None
    for place in range(layout.stage_ranks):
        ranks = [place, (layout.pp - 1) * layout.stage_ranks + place]
        group = dist.new_group(ranks, timeout=datetime.timedelta(seconds=deadline_s))
        if layout.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = group
    return found


def _greet(
    groups: Groups, link: dist.ProcessGroup, source: int, target: int, device: torch.device
) -> None:
    """Sends a message, so that both have connected before any order of work depends on it."""
    with groups.among_peers(f"connecting ranks {source} and {target}"):
        for place in dict.fromkeys((torch.device("cpu"), device)):
            word = torch.zeros(1, device=place)
            if groups.layout.rank == source:
                dist.send(word, target, link)
            else:
                dist.recv(word, source, link)
