"""Copies of the training's state in host memory, so that a death costs a few steps and no storage.

Every few steps each rank copies what it holds, and sends the next rank what that one does not hold:
the experts of its place, whatever is cut over ranks, and nothing that is replicated anyway. The
sending goes on beside the next step. When ranks have died, those left look for the newest step of
which they hold all pieces together, and bring each piece to whoever holds it in the new layout.

Pieces are boxes of named tensors (`model.box`), so the layouts need not be alike. Two
snapshots are kept, as the newest may be under way: the older one goes when every rank must have
finished the newer one, which a step made by all ranks since proves.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nmoe_train.checkpoint import gather_state, materialise_moments, state_boxes
from nmoe_train.model import Transformer
from nmoe_train.model.box import Box, whole_box
from nmoe_train.parallel.groups import Groups

TAG = 61_000
Stamp = tuple[int, int]
"""Step and generation of a snapshot: one step may be held twice, before and after a recovery."""


@dataclass(frozen=True)
class Piece:
    """A box of a named tensor."""

    name: str
    box: Box

    def words(self) -> list[Any]:
        """As JSON holds it."""
        return [self.name, self.box.start, self.box.shape, self.box.whole]

    @classmethod
    def said(cls, words: Sequence[Any]) -> "Piece":
        """The inverse of `words`."""
        name, *box = words
        return cls(name, Box(*(tuple(part) for part in box)))


Pieces = dict[Piece, Tensor]


def held_pieces(model: Transformer, optimizer: torch.optim.Optimizer) -> Pieces:
    """All of a rank's state, in pieces that share memory with the training."""
    boxes = state_boxes(model)
    return {
        Piece(name, boxes.get(name) or whole_box(tuple(tensor.shape))): tensor
        for name, tensor in gather_state(model, optimizer).items()
    }


def wanted_pieces(model: Transformer, optimizer: torch.optim.Optimizer) -> Pieces:
    """All pieces that a rank needs, of an optimizer that has made no step too, to be filled."""
    materialise_moments(model, optimizer, 0)
    return held_pieces(model, optimizer)


def count_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Tells the optimizer how many updates its moments have seen."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)


@dataclass
class _Snapshot:
    own: Pieces
    facts: dict[str, Any]
    kept: Pieces = field(default_factory=dict)
    """Of the rank before."""
    works: list[dist.Work] = field(default_factory=list)
    buffers: tuple[Tensor, ...] = ()
    settled_step: int | None = None
    """The step after which the exchange with both neighbours was found finished."""


@dataclass(frozen=True)
class Move:
    """Part of a piece that rank `source` holds and rank `target` needs."""

    source: int
    target: int
    piece: Piece
    part: Box


class Memory:
    """The snapshots of one process; it outlives generations. `every` steps, or never if 0."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._snapshots: dict[Stamp, _Snapshot] = {}
        self._generation = 0
        self._groups: Groups | None = None
        self._sent: list[Piece] = []
        self._received: dict[Piece, torch.dtype] = {}

    def restore(self, wanted: Pieces, groups: Groups, newer_than: int) -> dict[str, Any] | None:
        """Fills `wanted` with the newest state that the ranks hold together; every rank calls it.

        Gives what was noted with that state, `step` among it, or None if there is none of a step
        beyond `newer_than`.
        """
        if not self.every:
            return None
        held = {stamp: [*s.own, *s.kept] for stamp, s in self._snapshots.items()}
        facts = {stamp: snapshot.facts for stamp, snapshot in self._snapshots.items()}

        def inventory() -> dict[str, Any]:
            return {
                "held": [
                    [*stamp, facts[stamp], [piece.words() for piece in pieces]]
                    for stamp, pieces in held.items()
                    if stamp[0] > newer_than
                ],
                "wanted": [piece.words() for piece in wanted],
            }

        inventories = groups.all_do(inventory)
        plan = groups.first_does(lambda: _plan(inventories))
        if plan is None:
            return None
        stamp, moves = tuple(plan["stamp"]), [_move(words) for words in plan["moves"]]
        snapshot = self._snapshots.get(stamp)
        source = {} if snapshot is None else {**snapshot.kept, **snapshot.own}
        _carry_out(moves, source, wanted, groups)
        return {**plan["facts"], "step": stamp[0]}

    def open(self, pieces: Pieces, groups: Groups, generation: int) -> None:
        """Begins a generation: learns what the neighbours hold. Every rank calls it."""
        self._groups, self._generation = groups, generation
        self._sent, self._received = [], {}
        if groups.alone or not self.every:
            return
        dtypes = {piece: tensor.dtype for piece, tensor in pieces.items()}
        groups.all_do(lambda: [[*p.words(), str(dtype)[6:]] for p, dtype in dtypes.items()])
        rank, ranks = groups.layout.rank, groups.layout.ranks
        before, after = (_said(groups.said_by((rank + shift) % ranks)) for shift in (-1, 1))
        self._sent = [piece for piece in dtypes if piece not in after]
        self._received = {p: dtype for p, dtype in before.items() if p not in dtypes}

    def take(self, pieces: Pieces, step: int, facts: Mapping[str, Any]) -> None:
        """Copies the state after `step`, and begins to send the next rank what it lacks."""
        if not self.every:
            return
        assert self._groups is not None
        self.settle(step)
        self._drop_older_than_all_have(step)
        own = {piece: tensor.detach().to("cpu", copy=True) for piece, tensor in pieces.items()}
        snapshot = _Snapshot(own, dict(facts))
        if self._sent or self._received:
            rank, ranks = self._groups.layout.rank, self._groups.layout.ranks
            sent = _packed(own[piece] for piece in self._sent)
            kinds = [(piece.box.shape, dtype) for piece, dtype in self._received.items()]
            received = _room_for(kinds)
            snapshot.buffers = (sent, received)
            snapshot.kept = dict(zip(self._received, _unpacked(received, kinds), strict=True))
            snapshot.works = self._groups.trade(
                {(rank + 1) % ranks: sent} if self._sent else {},
                {(rank - 1) % ranks: received} if self._received else {},
                tag=TAG + step % 1000,
            )
        self._snapshots[step, self._generation] = snapshot

    def has(self, step: int) -> bool:
        """Whether this generation has copied the state after a step."""
        return (step, self._generation) in self._snapshots

    def settle(self, step: int) -> None:
        """Waits for what was sent and received; call it after the step that follows a `take`."""
        for snapshot in self._snapshots.values():
            if snapshot.settled_step is None:
                assert self._groups is not None
                self._groups.complete(snapshot.works)
                snapshot.works, snapshot.settled_step = [], step
                snapshot.buffers = snapshot.buffers[1:]

    def abandon(self) -> None:
        """The generation has ended: what is still under way will not come."""
        for snapshot in self._snapshots.values():
            if snapshot.settled_step is None:
                snapshot.works, snapshot.kept, snapshot.settled_step = [], {}, -1

    def _drop_older_than_all_have(self, step: int) -> None:
        """Drops what is older than a snapshot that all ranks have finished.

        One that was settled here a step ago was settled everywhere before that step was made.
        """
        finished = [
            stamp
            for stamp, snapshot in self._snapshots.items()
            if snapshot.settled_step is not None
            and 0 <= snapshot.settled_step < step
            and stamp[1] == self._generation
        ]
        if finished:
            newest = max(finished)
            self._snapshots = {s: kept for s, kept in self._snapshots.items() if s >= newest}


def plan_moves(
    held: Sequence[Mapping[Stamp, Sequence[Piece]]], wanted: Sequence[Sequence[Piece]]
) -> tuple[Stamp, list[Move]] | None:
    """The newest stamp of which the ranks hold all that they want, and who sends what to whom.

    held: pieces of each rank by stamp. wanted: pieces of each rank. What a rank holds itself it
    takes from there; of several holders of another piece, targets take turns.
    """
    stamps = sorted({stamp for pieces in held for stamp in pieces}, reverse=True)
    for stamp in stamps:
        holders: dict[str, dict[Piece, list[int]]] = {}
        for rank, pieces in enumerate(held):
            for piece in pieces.get(stamp, ()):
                holders.setdefault(piece.name, {}).setdefault(piece, []).append(rank)
        moves: list[Move] = []
        if all(
            _find(piece, target, holders.get(piece.name, {}), moves)
            for target, pieces in enumerate(wanted)
            for piece in pieces
        ):
            return stamp, moves
    return None


def _find(
    wanted: Piece, target: int, holders: Mapping[Piece, Sequence[int]], moves: list[Move]
) -> bool:
    """Adds the moves that make up a piece; False if some of it is nowhere."""
    missing = math.prod(wanted.box.shape)
    for piece, ranks in holders.items():
        part = wanted.box.overlap(piece.box)
        if part is not None:
            source = target if target in ranks else ranks[target % len(ranks)]
            moves.append(Move(source, target, piece, part))
            missing -= math.prod(part.shape)
    return missing == 0


def _plan(inventories: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """`plan_moves` on what ranks said, as words for all."""
    held: list[dict[Stamp, list[Piece]]] = []
    facts: dict[Stamp, Any] = {}
    for said in inventories:
        held.append({})
        for step, generation, noted, pieces in said["held"]:
            held[-1][step, generation] = [Piece.said(words) for words in pieces]
            facts[step, generation] = noted
    wanted = [[Piece.said(words) for words in said["wanted"]] for said in inventories]
    found = plan_moves(held, wanted)
    if found is None:
        return None
    stamp, moves = found
    words = [
        [move.source, move.target, move.piece.words(), Piece("", move.part).words()]
        for move in moves
    ]
    return {"stamp": stamp, "facts": facts[stamp], "moves": words}


def _said(words: Sequence[Sequence[Any]]) -> dict[Piece, torch.dtype]:
    """Pieces and their types, as a rank said them."""
    return {Piece.said(piece): getattr(torch, dtype) for *piece, dtype in words}


def _move(words: Sequence[Any]) -> Move:
    source, target, piece, part = words
    return Move(source, target, Piece.said(piece), Piece.said(part).box)


@torch.no_grad()
def _carry_out(
    moves: Sequence[Move], source: Mapping[Piece, Tensor], wanted: Pieces, groups: Groups
) -> None:
    """Brings every part to its target, in one message for each pair of ranks."""
    rank = groups.layout.rank
    targets = {piece.name: (piece, tensor) for piece, tensor in wanted.items()}
    sent: dict[int, list[Tensor]] = {}
    received: dict[int, list[Tensor]] = {}
    for move in moves:
        if move.source == rank:
            part = move.part.within(move.piece.box).of(source[move.piece])
            sent.setdefault(move.target, []).append(part)
        if move.target == rank:
            piece, tensor = targets[move.piece.name]
            received.setdefault(move.source, []).append(move.part.within(piece.box).of(tensor))
    kinds = {
        other: [(tuple(part.shape), part.dtype) for part in parts]
        for other, parts in received.items()
    }
    buffers = {other: _room_for(rows) for other, rows in kinds.items() if other != rank}
    packed = {other: _packed(parts) for other, parts in sent.items() if other != rank}
    groups.complete(groups.trade(packed, buffers, tag=TAG - 1))
    buffers |= {rank: _packed(sent[rank])} if rank in sent else {}
    for other, parts in received.items():
        for part, value in zip(parts, _unpacked(buffers[other], kinds[other]), strict=True):
            part.copy_(value)


def _padded(numbers: int, dtype: torch.dtype) -> int:
    """Bytes of so many numbers, up to the next multiple of 8: views need aligned starts."""
    return -(-numbers * dtype.itemsize // 8) * 8


def _packed(tensors: Iterable[Tensor]) -> Tensor:
    """All bytes of tensors, one after another, each padded: uint8 [N]."""
    rows = [tensor.contiguous().flatten().view(torch.uint8).cpu() for tensor in tensors]
    return torch.cat(
        [
            torch.empty(0, dtype=torch.uint8),
            *(torch.nn.functional.pad(row, (0, -row.numel() % 8)) for row in rows),
        ]
    )


def _unpacked(packed: Tensor, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """The tensors of these shapes and types that were packed; they share the memory."""
    counts = [math.prod(shape) for shape, _ in kinds]
    sizes = [_padded(n, dtype) for n, (_, dtype) in zip(counts, kinds, strict=True)]
    return [
        raw[: n * dtype.itemsize].view(dtype).view(shape)
        for raw, n, (shape, dtype) in zip(packed.split(sizes), counts, kinds, strict=True)
    ]


def _room_for(kinds: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> Tensor:
    """Memory for tensors of these shapes and types, packed."""
    size = sum(_padded(math.prod(shape), dtype) for shape, dtype in kinds)
    return torch.empty(size, dtype=torch.uint8)
