"""A rank that holds the others up is named, once, and only if it keeps doing so."""

from nmoe_train.telemetry.stragglers import Stragglers


def test_a_rank_that_is_slow_for_several_steps_is_named_once() -> None:
    found = Stragglers(2.0, 3)
    named = [found.observe([10.0, 11.0, 40.0, 9.0]) for _ in range(6)]
    assert [[rank for rank, _ in ranks] for ranks in named] == [[], [], [2], [], [], []]
    assert named[2][0][1] == 4.0


def test_a_rank_that_recovers_and_is_slow_again_is_named_again() -> None:
    found, slow, even = Stragglers(2.0, 2), [10.0, 50.0], [10.0, 10.0]
    steps = [found.observe(ms) for ms in (slow, even, slow, slow, even, slow, slow)]
    assert [len(named) for named in steps] == [0, 0, 0, 1, 0, 0, 1]


def test_small_or_common_slowness_names_nobody() -> None:
    found = Stragglers(2.0, 1)
    for times in ([1.0, 4.0, 1.0], [500.0, 500.0, 600.0], [80.0], [0.0, 0.0], [90.0, 90.0, 1.0]):
        assert found.observe(times) == []
