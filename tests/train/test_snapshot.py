"""Copies in memory: what ranks hold together is found, and brought to whoever needs it."""

from itertools import combinations

import pytest
import torch
from nmoe_train.elastic.snapshot import Memory, Piece, plan_moves
from nmoe_train.model.box import Box, whole_box
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups
from torch import Tensor

EXPERTS = 12


def expert(number: int) -> Piece:
    return Piece(f"model.experts.{number}.down", whole_box((2, 3)))


def dense(name: str = "embedding") -> Piece:
    return Piece(f"model.{name}", whole_box((4,)))


def own(rank: int, ranks: int) -> list[Piece]:
    """What a rank holds when all experts are spread over so many."""
    held = EXPERTS // ranks
    return [dense(), *(expert(n) for n in range(rank * held, (rank + 1) * held))]


def kept(rank: int, ranks: int) -> list[Piece]:
    """A rank's own pieces, and those of the one before that it has not."""
    before = own((rank - 1) % ranks, ranks)
    return [*own(rank, ranks), *(piece for piece in before if piece not in own(rank, ranks))]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_death_of_one_loses_nothing_and_of_two_nothing_unless_they_are_neighbours(
    ranks: int,
) -> None:
    for dead in (*combinations(range(ranks), 1), *combinations(range(ranks), 2)):
        left = [rank for rank in range(ranks) if rank not in dead]
        if not left:
            continue
        held = [{(8, 1): kept(rank, ranks)} for rank in left]
        wanted = [own(rank, len(left)) for rank in range(len(left))]
        found = plan_moves(held, wanted)
        neighbours = len(dead) == 2 and (dead[0] - dead[1]) % ranks in (1, ranks - 1)
        assert (found is None) == neighbours, dead
        if found is None:
            continue
        stamp, moves = found
        assert stamp == (8, 1)
        for target, pieces in enumerate(wanted):
            assert sorted(m.piece.name for m in moves if m.target == target) == sorted(
                piece.name for piece in pieces
            )
        for move in moves:
            assert move.piece in held[move.source][stamp]
            if move.piece in held[move.target][stamp]:
                assert move.source == move.target, "what is here is not sent"


def test_the_newest_whole_copy_is_taken_though_a_newer_one_is_in_part() -> None:
    held = [{(4, 1): kept(0, 2), (6, 1): own(0, 2)}, {(4, 1): kept(1, 2), (6, 1): own(1, 2)}]
    found = plan_moves(held, [own(0, 2), own(1, 2)])
    assert found is not None
    assert found[0] == (6, 1)
    # Now rank 1 is dead, and nobody has its part of the newer copy.
    found = plan_moves(held[:1], [own(0, 1)])
    assert found is not None
    assert found[0] == (4, 1)


def test_copies_of_one_step_from_before_and_after_a_recovery_are_not_mixed() -> None:
    held = [{(4, 1): own(0, 2)}, {(4, 2): own(1, 2)}]
    assert plan_moves(held, [own(0, 1)]) is None


def test_pieces_that_are_cut_otherwise_are_put_together() -> None:
    def row(start: int, count: int) -> Piece:
        return Piece("model.head", Box((start, 0), (count, 2), (12, 2)))

    held = [{(2, 1): [row(0, 6)]}, {(2, 1): [row(6, 6)]}]
    wanted = [[row(0, 4)], [row(4, 4)], [row(8, 4)]]
    found = plan_moves([*held, {}], wanted)
    assert found is not None
    parts = [(m.source, m.target, m.part.start[0], m.part.shape[0]) for m in found[1]]
    assert parts == [(0, 0, 0, 4), (0, 1, 4, 2), (1, 1, 6, 2), (1, 2, 8, 4)]


def test_what_is_held_in_part_is_not_taken_for_the_whole() -> None:
    whole, half = (Piece("model.head", Box((0,), (count,), (12,))) for count in (12, 6))
    assert plan_moves([{(2, 1): [half]}], [[whole]]) is None
    assert plan_moves([{(2, 1): [half]}], [[half]]) is not None


def test_targets_take_turns_with_those_who_hold_the_same() -> None:
    held = [{(2, 1): [dense()]}, {(2, 1): [dense()]}, {}, {}]
    found = plan_moves(held, [[dense()]] * 4)
    assert found is not None
    assert [(m.source, m.target) for m in found[1]] == [(0, 0), (1, 1), (0, 2), (1, 3)]


def state(value: float) -> dict[Piece, Tensor]:
    return {dense(): torch.full((4,), value), expert(0): torch.full((2, 3), value)}


def test_a_copy_does_not_change_with_the_training_and_comes_back_as_it_was() -> None:
    memory, alone, now = Memory(2), Groups(Layout()), state(1.0)
    memory.open(now, alone, 1)
    memory.take(now, 4, {"updates": 4})
    for tensor in now.values():
        tensor.fill_(9.0)
    back = state(0.0)
    assert memory.restore(back, alone, newer_than=0) == {"updates": 4, "step": 4}
    assert all(torch.equal(back[piece], value) for piece, value in state(1.0).items())


def test_what_is_on_disk_and_newer_is_not_taken_from_memory() -> None:
    memory, alone = Memory(2), Groups(Layout())
    memory.open(state(1.0), alone, 1)
    memory.take(state(1.0), 4, {})
    assert memory.restore(state(0.0), alone, newer_than=4) is None
    assert memory.restore(state(0.0), alone, newer_than=3) is not None


def test_no_more_than_three_copies_are_held_and_two_where_a_step_is_between() -> None:
    for every, most in ((1, 3), (2, 2), (5, 2)):
        memory, alone, counts = Memory(every), Groups(Layout()), []
        memory.open(state(0.0), alone, 1)
        for step in range(1, 40):
            memory.settle(step)
            if step % every == 0:
                memory.take(state(float(step)), step, {})
                counts.append(sum(memory.has(s) for s in range(step + 1)))
                assert memory.has(step - every) or step == every, "the one before is still there"
        assert max(counts) == counts[-1] == most


def test_off_by_choice_nothing_is_held() -> None:
    memory, alone = Memory(0), Groups(Layout())
    memory.open(state(1.0), alone, 1)
    memory.take(state(1.0), 4, {})
    assert not memory.has(4)
    assert memory.restore(state(0.0), alone, newer_than=0) is None
