"""Who trains together after workers came or went: the rules, over every small case there is."""

from itertools import chain, combinations, product

import pytest
from nmoe_train.config import Config
from nmoe_train.elastic.membership import (
    Generation,
    Worker,
    chosen_workers,
    largest_layout,
    next_generation,
    side_that_goes_on,
)


def config(
    batch: int = 12, experts: int = 12, ep: int = 4, **sections: dict[str, object]
) -> Config:
    moe = {"experts": experts, "top_k": 2, "expert_width": 4}
    model = {"width": 8, "layers": 2, "heads": 2, "dense_width": 8, "moe": moe}
    train = {"steps": 1, "seq_len": 8, "batch_size": batch, **sections.pop("train", {})}
    parallel = {"ep": ep, **sections.pop("parallel", {})}
    tree = {"model": model, "train": train, "parallel": parallel, **sections}
    return Config.model_validate(tree)


def worker(number: int, slot: int) -> Worker:
    return Worker(number, (1, slot), "host", f"host:{number}", 1000 + number)


def reach(sides: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    """Whom each worker reaches when every side is whole, and no two are connected."""
    return {number: side for side in sides for number in side}


def splits(count: int) -> list[tuple[tuple[int, ...], ...]]:
    """All ways to divide so many workers into sides."""
    found = []
    for labels in product(range(count), repeat=count):
        if list(dict.fromkeys(labels)) == list(range(len(set(labels)))):
            sides = [tuple(n for n in range(count) if labels[n] == s) for s in set(labels)]
            found.append(tuple(sides))
    return found


def subsets(items: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(items, n) for n in range(len(items) + 1)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_of_all_sides_that_reach_the_coordinator_exactly_one_goes_on(count: int) -> None:
    last = tuple(range(count))
    for sides in splits(count):
        for heard in subsets(last):
            # Sides may be torn once more by who reaches the coordinator, and by who has died.
            reached = {n: side for n, side in reach(sides).items() if n in heard}
            went_on = side_that_goes_on(last, reached)
            whole = [tuple(n for n in side if n in heard) for side in sides]
            whole = [side for side in whole if side]
            assert (went_on in whole) if whole else went_on == ()
            assert all(len(side) <= len(went_on) for side in whole)
            ties = [side for side in whole if len(side) == len(went_on)]
            assert not ties or went_on == min(ties, key=min)


def test_whoever_goes_on_reaches_each_other_whatever_links_are_gone() -> None:
    last = (3, 1, 4, 0)
    pairs = list(combinations(last, 2))
    for links in product([True, False], repeat=len(pairs)):
        reached = {n: {n} for n in last}
        for (a, b), linked in zip(pairs, links, strict=True):
            if linked:
                reached[a].add(b)
                reached[b].add(a)
        went_on = side_that_goes_on(last, reached)
        assert went_on, "somebody does"
        assert all(b in reached[a] for a in went_on for b in went_on)
        if all(links):
            assert went_on == last
        if sum(links) == len(links) - 1:
            assert len(went_on) == 3, "one link lost costs one worker"


def test_a_link_counts_only_if_both_ends_have_it() -> None:
    assert side_that_goes_on((0, 1), {0: (0, 1), 1: (1,)}) == (0,)


def test_a_clean_half_goes_on_with_the_lowest_rank_wherever_it_is() -> None:
    last = (7, 5, 6, 8)
    assert side_that_goes_on(last, reach(((5, 6), (7, 8)))) == (7, 8)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (0, None),
        (1, (1, 1)),
        (2, (2, 2)),
        (3, (3, 3)),
        (4, (4, 4)),
        (5, (4, 4)),
        (6, (6, 6)),
        (7, (6, 6)),
    ],
)
def test_the_largest_layout_uses_as_many_workers_as_divide_the_batch(
    workers: int, expected: tuple[int, int] | None
) -> None:
    layout = largest_layout(config(), workers)
    assert (None if layout is None else (layout.dp, layout.ep)) == expected


def test_neighbours_that_split_experts_stay_together() -> None:
    split = {"parallel": {"tp": 2, "etp": 2}}
    for workers, sizes in ((2, (1, 1)), (5, (2, 2)), (8, (4, 4)), (13, (6, 6))):
        layout = largest_layout(config(ep=workers // 2, **split), workers)
        assert layout is not None
        assert (layout.tp, layout.etp, layout.dp, layout.ep) == (2, 2, *sizes)


def test_every_layout_chosen_divides_batch_micro_batches_and_experts() -> None:
    for batch, experts, ep, micro in product((8, 12, 16), (6, 8, 12), (1, 2, 4), (None, 1, 2)):
        if experts % ep:
            continue
        checked = config(batch, experts, ep, train={"micro_batch_size": micro})
        for workers in range(1, 13):
            layout = largest_layout(checked, workers)
            assert layout is not None
            assert layout.ranks <= workers
            assert batch % layout.dp == 0
            assert micro is None or batch // layout.dp % micro == 0
            assert experts % layout.ep == 0
            assert layout.dp % layout.ep == 0
            larger = [d for d in range(layout.dp + 1, workers + 1) if batch % d == 0]
            assert all(micro and batch // d % micro for d in larger)


def test_every_layout_chosen_has_micro_batches_that_its_pipeline_takes() -> None:
    pipeline = {"schedule": "interleaved", "chunks": 2}
    interleaved = config(
        ep=1, parallel={"pp": 2, "pipeline": pipeline}, train={"micro_batch_size": 2}
    )
    # Two shares would have three micro-batches each, and two stages take an even number.
    chosen = [largest_layout(interleaved, workers) for workers in (6, 5, 4, 3)]
    assert [layout.dp if layout else None for layout in chosen] == [3, 1, 1, 1]


def test_experts_are_not_spread_over_fewer_ranks_than_can_hold_them() -> None:
    bounded = config(ep=4, elastic={"min_ep": 3})
    assert [largest_layout(bounded, n) is not None for n in (1, 2, 3, 4)] == [0, 0, 1, 1]
    # Three ranks cannot hold 8 experts evenly, so one of them waits.
    eight = config(experts=8, ep=2, elastic={"min_ep": 2})
    layout = largest_layout(eight, 3)
    assert layout is not None
    assert (layout.dp, layout.ep) == (2, 2)


def test_dp_as_configured_is_a_bound_and_min_ranks_another() -> None:
    bounded = config(ep=1, parallel={"dp": 2}, elastic={"min_ranks": 2})
    sizes = [largest_layout(bounded, workers) for workers in (1, 2, 3, 4)]
    assert [None if s is None else s.ranks for s in sizes] == [None, 2, 2, 2]


def test_whoever_returns_to_a_place_gets_the_rank_of_the_one_before() -> None:
    first = next_generation(config(), None, [worker(n, n) for n in range(4)])
    assert first is not None
    smaller = next_generation(config(), first, [w for w in first.members if w.number != 1])
    assert smaller is not None
    assert [w.number for w in smaller.members] == [0, 2, 3]
    whole = next_generation(config(), smaller, [*smaller.members, worker(9, 1)])
    assert whole is not None
    assert [w.number for w in whole.members] == [0, 9, 2, 3]
    assert whole.joined == (9,)
    assert [g.number for g in (first, smaller, whole)] == [1, 2, 3]
    assert Generation.decode(whole.encode()) == whole


def test_members_stay_and_whoever_is_beyond_the_layout_waits() -> None:
    first = next_generation(config(), None, [worker(n, n) for n in range(1, 5)])
    assert first is not None
    both = next_generation(config(), first, [*first.members, worker(9, 0)])
    assert both is not None
    assert {w.number for w in both.members} == {1, 2, 3, 4}


def test_whoever_waits_is_taken_only_if_it_reaches_all() -> None:
    reached = {0: (0, 1, 8, 9), 1: (0, 1, 9), 8: (0, 1, 8, 9), 9: (0, 1, 8, 9)}
    assert chosen_workers((0, 1), (8, 9), reached) == (0, 1, 9)
