"""Peers that are late, dead or elsewhere: a clear error in time, on every rank, and no hang.

Real processes. A rank that is late on purpose waits for the others to give up, so that no test
depends on how fast the machine is.
"""

import pytest
from rdep_ranks import Group, Refusal, run_groups

# The deadline where it must pass: more than a healthy rank needs on a busy machine.
SHORT_S, LONG_S = 10.0, 200.0


def bad(ranks, who, how, deadline_s, **more):
    return Group("bad_peer", ranks, {"bad": who, "how": how, "deadline_s": deadline_s, **more})


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    groups = {
        "waited for": bad(3, [2], "sleeps", LONG_S, seconds=30.0),
        "late": bad(4, [1, 3], "comes too late", SHORT_S),
        "dead": bad(3, [2], "dies", LONG_S),
        "dead in the exchange": bad(3, [2], "dies in the exchange", LONG_S),
        "still in the exchange": bad(3, [2], "stands still in the exchange", SHORT_S),
        "no backward": bad(3, [2], "skips the backward", SHORT_S),
        "another shape": bad(3, [2], "is in another layer", LONG_S),
        "another order": bad(3, [2], "swaps two layers", LONG_S),
    }
    return run_groups(tmp_path_factory.mktemp("peers"), groups)


def healthy(answers, name, who):
    refusals = [answer for rank, answer in enumerate(answers[name]) if rank not in who]
    assert all(isinstance(refusal, Refusal) for refusal in refusals)
    assert all("\n" not in refusal.message for refusal in refusals)
    return refusals


def test_a_peer_30_s_late_is_waited_for(answers):
    """Fault 11: late by a compilation, say; the others go on with the right answer."""
    for rank, (answer, counters) in enumerate(answers["waited for"]):
        assert answer["y"].isfinite().all()
        waits = counters.wait_s_R.tolist()
        if rank != 2:
            assert waits[2] > 20
            assert waits[2] > 10 * sum(waits[:2])


def test_late_peers_are_named_with_layer_and_epoch(answers):
    for refusal in healthy(answers, "late", [1, 3]):
        assert refusal.code == "E-RDEP-LATE"
        assert (
            "ranks 1, 3 did not take part in the dispatch of layer up 7, epoch 1" in refusal.message
        )
        assert "within 10 s" in refusal.message


def test_a_late_peer_learns_that_the_others_have_left(answers):
    for rank in (1, 3):
        refusal = answers["late"][rank]
        assert refusal.code == "E-RDEP-PEER"
        assert " left while this rank was in the dispatch" in refusal.message


@pytest.mark.parametrize("name", ["dead", "dead in the exchange"])
def test_a_killed_peer_is_named_long_before_the_deadline(answers, name):
    assert answers[name][2] is None
    refusals = healthy(answers, name, [2])
    assert all(refusal.code == "E-RDEP-PEER" for refusal in refusals)
    where = "left while this rank was in the dispatch of layer up 7, epoch 1"
    assert all(where in refusal.message for refusal in refusals)
    # One survivor may leave first; then it is that one that the other sees.
    assert any("rank 2 left" in refusal.message for refusal in refusals)


def test_a_peer_that_stands_still_in_the_exchange_is_given_up(answers):
    """Survivors find each other, so that the one that stands still is named alone."""
    for refusal in healthy(answers, "still in the exchange", [2]):
        assert refusal.code == "E-RDEP-LATE"
        assert "rank 2 did not take part in the dispatch of layer up 7, epoch 1" in refusal.message


def test_a_peer_without_a_backward_is_named(answers):
    for refusal in healthy(answers, "no backward", [2]):
        assert refusal.code == "E-RDEP-LATE"
        assert "rank 2 did not take part in the second dispatch of layer up 7" in refusal.message
        assert "epoch 3" in refusal.message


@pytest.mark.parametrize("name", ["another shape", "another order"])
def test_a_peer_in_another_layer_is_noticed(answers, name):
    for refusal in healthy(answers, name, []):
        assert refusal.code in ("E-RDEP-ORDER", "E-RDEP-PEER")
    orders = [answer.message for answer in answers[name] if "ORDER" in answer.code]
    assert orders
    assert all("make every rank run the same layers" in message for message in orders)
