"""Several ranks give the output and every gradient of one rank that holds all tokens and experts.

Real processes over gloo. Relative errors, norm over norm. fp32 sums of a few terms in another order
differ by a few units of 6e-8; in bf16 the rows that come back are rounded once more, at 8 bits of
mantissa. Gradients of expert weights are the same bits: an expert sees the same rows in the same
order.
"""

import moe_oracle as oracle
import pytest
import torch
from nmoe_kernels import moe
from rdep_inputs import as_routing, make_problem, share
from rdep_ranks import Group, run_groups

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
TOKENS = {1: [777], 2: [1, 4096], 4: [0, 1, 777, 4096]}


def case(tokens, experts, slots, kind, dtype=torch.float32, dropped=0.0, **more):
    problem = {
        "tokens": tokens, "experts": experts, "slots": slots, "kind": kind, "dtype": dtype,
        "dropped": dropped,
    }  # fmt: skip
    return {"problem": problem, **more}


def cases_of(ranks):
    """Uniform, Zipf, one-hot; one expert of a rank and several; K above E_l; rows kept or not."""
    tokens, found = TOKENS[ranks], {}
    for dtype in TOLERANCE:
        for kind, slots in (("uniform", 3), ("zipf", 3), ("one-hot", 1)):
            for experts in (4, 8):
                name = f"{ranks} ranks, {kind}, {experts} experts, {dtype}"
                found[name] = case(tokens, experts, slots, kind, dtype)
        fetched = {"settings": {"keep": "fetch"}}
        found[f"{ranks} ranks, fetched, {dtype}"] = case(tokens, 8, 3, "zipf", dtype, **fetched)
    collective = {"settings": {"transport": "collective"}}
    found[f"{ranks} ranks, dropped"] = case(tokens, 8, 3, "uniform", dropped=0.4, **collective)
    found[f"{ranks} ranks, all dropped"] = case(tokens, 8, 3, "uniform", dropped=1.0)
    found[f"{ranks} ranks, no tokens"] = case([0] * ranks, 8, 3, "uniform")
    for name, options in (("recomputed", {"recompute": True}), ("plain", {"backend": "reference"})):
        small = [3 + rank for rank in range(ranks)]
        found[f"{ranks} ranks, {name}"] = case(small, 8, 3, "zipf", options=options)
    return found


MOVED = case([9, 0, 64, 31], 12, 4, "zipf", dropped=0.1)["problem"]
CASES = {ranks: cases_of(ranks) for ranks in TOKENS}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    groups = {
        str(ranks): Group("parity", ranks, {"cases": list(cases.values())})
        for ranks, cases in CASES.items()
    }
    repeated = {"problem": case([9, 0, 64, 31], 8, 3, "zipf")["problem"], "times": 5}
    groups |= {name: Group("repeated", 4, repeated) for name in ("once", "again")}
    groups["moved"] = Group("moved", 4, {"problem": MOVED})
    results = run_groups(tmp_path_factory.mktemp("parity"), groups)
    found = {
        name: [ranked[number] for ranked in results[str(ranks)]]
        for ranks, cases in CASES.items()
        for number, name in enumerate(cases)
    }
    return found | {name: results[name] for name in ("once", "again", "moved")}


def single_rank(problem, **options):
    """The layer without expert parallelism: y and gradients by name."""
    names = ("x", "weights", "gate_up", "down")
    leaves = [getattr(problem, name).clone().requires_grad_() for name in names]
    x, weights, gate_up, down = leaves
    y = moe(x, as_routing(problem.ids, weights, gate_up.shape[0]), gate_up, down, **options)
    grads = torch.autograd.grad((y * problem.grad).sum(), leaves)
    return {"y": y.detach(), **dict(zip(names, grads, strict=True))}


def gathered(ranked):
    """The ranks' answers put together in the order of ranks."""
    return {name: torch.cat([answer[name] for answer in ranked]) for name in ranked[0]}


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_output_and_gradients_are_those_of_one_rank(answers, name):
    wanted = next(cases[name] for cases in CASES.values() if name in cases)
    problem = make_problem(**wanted["problem"])
    want = single_rank(problem, **wanted.get("options", {}))
    got = gathered(answers[name])
    dtype = wanted["problem"]["dtype"]
    for part, expected in want.items():
        assert got[part].dtype == expected.dtype
        if part in ("gate_up", "down"):
            assert torch.equal(got[part], expected), part
        assert oracle.relative_error(got[part], expected) < TOLERANCE[dtype], part
    for answer, tokens in zip(answers[name], wanted["problem"]["tokens"], strict=True):
        assert answer["y"].shape[0] == tokens


@pytest.mark.parametrize("ranks", TOKENS)
def test_output_is_the_oracles(answers, ranks):
    """Against the definition, token by token in fp64, on a few tokens of the last rank."""
    name = f"{ranks} ranks, zipf, 8 experts, torch.float32"
    wanted = CASES[ranks][name]["problem"]
    problem, tokens = make_problem(**wanted), wanted["tokens"]
    mine = share(problem, tokens, ranks - 1)
    got = answers[name][-1]["y"]
    for token in (0, 5, tokens[-1] - 1):
        want = sum(
            weight * oracle.expert(mine.x[token].double(), gate_up.double(), down.double())
            for expert, weight in zip(mine.ids[token], mine.weights[token].double(), strict=True)
            for gate_up, down in [(problem.gate_up[expert], problem.down[expert])]
        )
        assert oracle.relative_error(got[token], want) < 5e-6


def test_a_transport_hands_over_rows_by_source_and_token(answers):
    """With local ids and weights, and none for the slots whose expert is another rank's."""
    problem, tokens = make_problem(**MOVED), MOVED["tokens"]
    for rank, answer in enumerate(answers["moved"]):
        own = (problem.ids >= 3 * rank) & (problem.ids < 3 * rank + 3)
        here = own.any(1)
        assert torch.equal(answer["rows"], problem.x[here])
        assert torch.equal(answer["again"], 2 * problem.x[here])
        assert torch.equal(answer["ids"], torch.where(own, problem.ids - 3 * rank, -1)[here].int())
        assert torch.equal(answer["weights"], torch.where(own, problem.weights, 0.0)[here])
        assert answer["assignments"] == int(own.sum())
        mine = share(problem, tokens, rank)
        owners = torch.where(mine.ids < 12, mine.ids // 3, -1)
        copies = torch.tensor([len({*row} - {-1}) for row in owners.tolist()])
        assert torch.allclose(answer["sums"], mine.x * copies[:, None])
        assert torch.equal(answer["weights back"], torch.where(mine.ids < 12, mine.weights, 0.0))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_owners_are_added_in_rank_order_in_fp32(answers, dtype):
    """Bit for bit what each owner alone gives, added one after another and rounded once."""
    wanted = CASES[4][f"4 ranks, zipf, 8 experts, {dtype}"]["problem"]
    problem = make_problem(**wanted)
    total = torch.zeros(problem.x.shape)
    for owner in range(4):
        own = problem.ids // 2 == owner
        routing = as_routing(torch.where(own, problem.ids, 8), problem.weights, 8)
        total += moe(problem.x, routing, problem.gate_up, problem.down).float()
    got = gathered(answers[f"4 ranks, zipf, 8 experts, {dtype}"])["y"]
    assert torch.equal(got, total.to(dtype))


def test_fault_13_expert_gradients_are_sums_over_ranks(answers):
    """Twice the ranks with the same tokens give the same gradient, not twice as much."""
    for experts in (4, 8):
        name = f"4 ranks, uniform, {experts} experts, torch.float32"
        problem = make_problem(**CASES[4][name]["problem"])
        want = single_rank(problem)
        got = gathered(answers[name])
        for part in ("gate_up", "down"):
            assert got[part].norm() / want[part].norm() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_fault_12_ranks_that_own_several_experts(answers, kind):
    """Each expert's gradient lies at its own place, whether a rank owns one expert or two."""
    for experts in (4, 8):
        name = f"4 ranks, {kind}, {experts} experts, torch.float32"
        want = single_rank(make_problem(**CASES[4][name]["problem"]))
        for rank, answer in enumerate(answers[name]):
            owned = slice(rank * experts // 4, (rank + 1) * experts // 4)
            assert torch.equal(answer["gate_up"], want["gate_up"][owned])
            assert answer["gate_up"].any()


def test_a_rank_without_tokens_takes_part(answers):
    name = "4 ranks, one-hot, 8 experts, torch.float32"
    ranked = answers[name]
    assert ranked[0]["y"].shape == ranked[0]["x"].shape == (0, 16)
    # All tokens went to the last expert: the others' gradients are zeros, and are there.
    for answer in ranked[:3]:
        assert not answer["gate_up"].any()
        assert not answer["down"].any()
    assert ranked[3]["down"][1].any()
    for answer in answers["4 ranks, no tokens"]:
        assert not answer["gate_up"].any()


def test_runs_repeat_bitwise(answers):
    """Within a process and between launches, whenever each rank arrives."""
    for once, again in zip(answers["once"], answers["again"], strict=True):
        for answer in [*once, *again]:
            for part, value in answer.items():
                assert torch.equal(value, once[0][part]), part
