"""The plan on its own: who gets which row, in which order, at any size of group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nmoe_kernels.experts import run_experts
from nmoe_kernels.rdep.memory import lay_out
from nmoe_kernels.rdep.plan import plan_source
from nmoe_kernels.rdep.transports import Shape
from rdep_inputs import random_ids

SIZES = [(64, 256), (64, 512), (72, 288), (72, 504), (4, 8), (3, 3), (1, 6)]


def send(plan, total):
    """What each owner gets, by hand: (owner, token, local ids) row after row."""
    owner_S, token_S = plan.sent_order(total)
    ids_SK, own_SK = plan.local_ids(owner_S, token_S)
    assert torch.equal(own_SK, ids_SK >= 0)
    return list(zip(owner_S.tolist(), token_S.tolist(), ids_SK.tolist(), strict=True))


def expected_rows(ids_TK, experts, ranks):
    """The definition: for each owner, in token order, a token that has an expert there, once."""
    local = experts // ranks
    rows = []
    for owner in range(ranks):
        for token, chosen in enumerate(ids_TK.tolist()):
            mine = [
                e - owner * local if e // local == owner and e < experts else -1 for e in chosen
            ]
            if max(mine) >= 0:
                rows.append((owner, token, mine))
    return rows


def check_plan(ids_TK, experts, ranks):
    plan = plan_source(ids_TK, experts, ranks)
    rows = expected_rows(ids_TK, experts, ranks)
    assert send(plan, len(rows)) == rows
    assert int(plan.rows_R.sum()) == len(rows)
    kept = ids_TK[ids_TK < experts]
    per_owner = torch.bincount(kept // (experts // ranks), minlength=ranks)
    assert torch.equal(plan.assignments_R, per_owner)
    return plan, rows


@st.composite
def routings(draw):
    ranks = draw(st.integers(1, 9))
    experts = ranks * draw(st.integers(1, 7))
    slots = draw(st.integers(1, min(experts, 8)))
    tokens = draw(st.integers(0, 40))
    dropped = draw(st.sampled_from([0.0, 0.3, 1.0]))
    kind = draw(st.sampled_from(["uniform", "zipf", "one-hot"]))
    seed = draw(st.integers(0, 2**31))
    return random_ids(tokens, experts, slots, kind, seed, dropped), experts, ranks


@settings(deadline=None, max_examples=120)
@given(routings())
def test_every_token_goes_once_to_each_owner_of_its_experts(routing):
    ids_TK, experts, ranks = routing
    plan, rows = check_plan(ids_TK, experts, ranks)
    sent = [(owner, token) for owner, token, _ in rows]
    assert len(set(sent)) == len(sent)
    assignments = sum(e >= 0 for _, _, mine in rows for e in mine)
    assert assignments == ids_TK.numel() - int((ids_TK == experts).sum())
    assert assignments == int(plan.assignments_R.sum())


@settings(deadline=None, max_examples=60)
@given(routings())
def test_slots_of_an_owner_count_up_in_token_order(routing):
    plan, rows = check_plan(*routing)
    slots = [int(plan.slot_TR[token, owner]) for owner, token, _ in rows]
    counted = [slot for sent in plan.rows_R.tolist() for slot in range(sent)]
    assert slots == counted
    assert int((plan.slot_TR >= 0).sum()) == len(rows)


@pytest.mark.parametrize(("ranks", "experts"), SIZES)
@pytest.mark.parametrize("kind", ["uniform", "zipf", "one-hot"])
def test_groups_of_up_to_72_ranks(ranks, experts, kind):
    slots = 1 if kind == "one-hot" else min(8, experts)
    ids_TK = random_ids(101, experts, slots, kind, seed=7)
    plan, _ = check_plan(ids_TK, experts, ranks)
    if kind == "one-hot":
        assert plan.rows_R.count_nonzero() == 1
    elif ranks >= 64:
        # Fault 12: owners past the 32nd are served like the others.
        assert plan.rows_R[33:].sum() > 0


@pytest.mark.parametrize(("ranks", "experts"), [(1, 6), (3, 12), (8, 16), (72, 72)])
def test_rows_by_owner_give_the_order_of_one_rank_with_all_tokens(ranks, experts):
    """Each expert sees (source rank, token) in order, through the grouping that the experts use."""
    sources = [random_ids(tokens, experts, 3, "zipf", seed=tokens) for tokens in (0, 1, 29, 64)]
    everything = torch.cat(sources)
    sent = [check_plan(ids, experts, ranks)[1] for ids in sources]
    firsts = [0, 0, 1, 30]
    for owner in range(ranks):
        here = [
            (first + token, mine)
            for first, rows in zip(firsts, sent, strict=True)
            for to, token, mine in rows
            if to == owner
        ]
        for local in range(experts // ranks):
            expert = owner * (experts // ranks) + local
            got = [token for token, mine in here if local in mine]
            assert got == (everything == expert).any(1).nonzero().flatten().tolist()


def test_no_tokens_give_an_empty_plan():
    plan = plan_source(torch.empty(0, 4, dtype=torch.int64), 8, 4)
    assert plan.slot_TR.shape == (0, 4)
    assert plan.rows_R.tolist() == plan.assignments_R.tolist() == [0, 0, 0, 0]
    assert [len(part) for part in plan.sent_order(0)] == [0, 0]


def test_more_slots_than_experts_of_an_owner():
    plan = plan_source(torch.tensor([[3, 1, 0, 2]]), 4, 4)
    assert plan.rows_R.tolist() == [1, 1, 1, 1]
    assert send(plan, 4)[2] == (2, 0, [-1, -1, -1, 0])


@pytest.mark.parametrize(("ranks", "tokens_max"), [(2, 2**18), (8, 2**16), (72, 2**16)])
def test_fault_10_receive_areas_may_pass_2_and_4_gib(ranks, tokens_max):
    """Their parts lie where exact arithmetic puts them, apart, and nothing wraps."""
    width, slots = 7168, 8
    shape = Shape(
        rank=0, ranks=ranks, experts=288, slots=slots, width=width, tokens_max=tokens_max,
        dtype=torch.bfloat16, device=torch.device("cuda"), capacity=None, deadline_s=1.0,
    )  # fmt: skip
    parts = lay_out(shape)
    rows = ranks * tokens_max
    sizes = {"rows": rows * width * 2, "ids": rows * slots * 4}
    assert sizes["rows"] > 2**32
    starts = sorted((start, name) for name in sizes for start in getattr(parts, name))
    ends = [start + sizes[name] for start, name in starts]
    assert all(end <= start for end, (start, _) in zip(ends, starts[1:], strict=False))
    assert starts[0][0] >= 0
    assert parts.size >= ends[-1] > 2**33


def test_fault_10_counts_of_rows_are_64_bit():
    plan = plan_source(torch.zeros(5, 1, dtype=torch.int64), 2, 2)
    assert plan.rows_R.dtype == plan.assignments_R.dtype == torch.int64


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("spare", [0, 1, 7, 1000])
def test_a_bound_of_the_assignments_changes_nothing(backend, spare, poisoned_memory):
    """Rows are made for the slots that have an expert here, not for all N * K."""
    experts, slots, width, inner = 5, 4, 16, 8
    ids = random_ids(40, experts, slots, "zipf", seed=3, dropped=0.6).where(
        torch.rand(40, slots) < 0.9, torch.tensor(-1)
    )
    ids[ids == experts] = -1
    assignments = int((ids >= 0).sum())
    inputs = [
        torch.randn(40, width), torch.rand(40, slots),
        torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner),
    ]  # fmt: skip
    grad = torch.randn(40, width)

    def run(bound):
        x, weights, gate_up, down = (part.clone().requires_grad_() for part in inputs)
        y = run_experts(x, ids, weights, gate_up, down, backend=backend, assignments=bound)
        return y, *torch.autograd.grad((y * grad).sum(), (x, weights, gate_up, down))

    for got, want in zip(run(assignments + spare), run(None), strict=True):
        assert torch.equal(got, want)
