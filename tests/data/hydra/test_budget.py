"""The budget: never passed, and left unused by less than one request."""

import asyncio
from pathlib import Path

import pytest
from judge_server import JudgeServer, scores_json
from nmoe_data.hydra.client import Budget, Usage
from nmoe_data.hydra.session import Graded, grade_documents

PRICES = {"price_in": 3.0, "price_out": 15.0}


@pytest.fixture
def grade(judge, documents, code_rubric, tmp_path: Path):
    def run(count: int, budget: dict[str, float], **changes: object) -> Graded:
        judges = [judge(**{**PRICES, **changes})]
        return grade_documents(
            documents(count), judges, code_rubric, tmp_path / "c.sqlite", **budget
        )

    return run


def charged(server: JudgeServer) -> tuple[int, float]:
    """Tokens and cost that the server counts, from what it was sent and what it answered."""
    tokens, cost = 0, 0.0
    for request in server.requests:
        if request.kind == "judged":
            prompt = sum(len(m["content"].encode()) for m in request.body["messages"]) // 4
            reply = len(scores_json((1, 1, 1, 1, 1))) // 4 + 1
            tokens += prompt + reply
            cost += (prompt * PRICES["price_in"] + reply * PRICES["price_out"]) / 1e6
    return tokens, cost


@pytest.mark.parametrize("concurrency", [1, 64])
@pytest.mark.parametrize("limit", ["max_tokens", "max_cost"])
def test_a_run_stops_within_one_request_of_its_budget(
    limit: str, concurrency: int, server: JudgeServer, grade
) -> None:
    server.behaviour.latency_s = 0.01
    budget = {"max_tokens": 60_000, "max_cost": 0.2}[limit]
    done = grade(300, {limit: budget}, concurrency=concurrency)
    assert done.stopped_by == limit.replace("_", "-")
    assert done.error is None
    used = dict(zip(("max_tokens", "max_cost"), charged(server), strict=True))[limit]
    largest = max(len(str(request.body).encode()) for request in server.requests)
    worst = {"max_tokens": largest + 512, "max_cost": (largest * 3 + 512 * 15) / 1e6}[limit]
    assert budget - worst <= used <= budget
    assert {"max_tokens": done.usage.tokens, "max_cost": done.usage.cost}[limit] == pytest.approx(
        used
    )
    assert len(done.labels) == len(server.payments) < 300


def test_a_budget_counts_what_earlier_runs_spent_and_can_be_raised(server, grade) -> None:
    first = grade(300, {"max_tokens": 40_000})
    assert 0 < len(first.labels) < 300
    again = grade(300, {"max_tokens": 40_000})
    assert len(again.labels) == len(first.labels)
    assert len(server.payments) == len(first.labels)
    more = grade(300, {"max_tokens": 80_000})
    assert len(first.labels) < len(more.labels) < 300
    assert charged(server)[0] <= 80_000


def test_paid_replies_without_a_judgement_count_too(server, grade) -> None:
    server.behaviour.faults = {"prose": 1.0}
    done = grade(100, {"max_tokens": 50_000})
    assert done.stopped_by == "max-tokens"
    assert 25_000 < done.usage.tokens <= 50_000


def test_what_a_server_may_have_charged_without_an_answer_counts(
    server, grade, monkeypatch
) -> None:
    server.behaviour.faults = {"timeout": 1.0}
    done = grade(8, {"max_tokens": 50_000}, timeout_s=0.2)
    assert done.usage.tokens > 4 * 512
    assert done.usage.tokens <= 50_000


def test_requests_that_were_refused_cost_nothing(server, grade) -> None:
    server.behaviour.faults = {"bad_request": 0.5}
    done = grade(10, {"max_tokens": 500_000})
    assert done.usage.tokens == charged(server)[0]


def test_a_reply_without_usage_counts_as_its_worst_case(server, grade, monkeypatch) -> None:
    completion = JudgeServer._completion

    def without_usage(self, *arguments, **named):
        answer = completion(self, *arguments, **named)
        answer.body = answer.body.replace(b'"usage"', b'"other"')
        return answer

    monkeypatch.setattr(JudgeServer, "_completion", without_usage)
    done = grade(5, {"max_tokens": 500_000})
    sizes = [len(str(request.body).encode()) for request in server.requests]
    assert done.usage.completion_tokens == 5 * 512
    assert done.usage.prompt_tokens == pytest.approx(sum(sizes), rel=0.05)


def test_a_reservation_waits_for_those_under_way_and_fails_when_there_are_none() -> None:
    async def play() -> list[bool]:
        budget = Budget(max_tokens=100)
        worst = Usage(60, 0)
        granted = [await budget.reserve(worst)]
        waiting = asyncio.create_task(budget.reserve(worst))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await budget.settle(worst, Usage(10, 0))
        granted.append(await waiting)
        await budget.settle(worst, Usage(60, 0))
        granted.append(await budget.reserve(worst))
        granted.append(budget.exhausted)
        return granted

    assert asyncio.run(play()) == [True, True, False, True]


def test_a_limit_that_is_exactly_reached_is_kept() -> None:
    async def play() -> list[bool]:
        budget = Budget(max_cost=1.0)
        half = Usage(1, 0, 0.5)
        taken = []
        for _ in range(3):
            taken.append(await budget.reserve(half))
            if taken[-1]:
                await budget.settle(half, half)
        return taken

    assert asyncio.run(play()) == [True, True, False]


def test_an_answer_without_a_choice_counts_as_its_worst_case(server: JudgeServer, grade) -> None:
    server.behaviour.faults = {"no_choices": 1.0}
    done = grade(1, {"max_tokens": 60_000})
    assert done.labels[0].detail == "no_choices"
    assert done.usage.completion_tokens == 512
    assert done.usage.prompt_tokens >= len(server.requests[0].body["messages"][0]["content"])
