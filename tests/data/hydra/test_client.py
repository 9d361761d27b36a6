"""The client against a judge that misbehaves: each failure under its name, none a low score."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest
from judge_server import JudgeServer, hidden_scores
from nmoe_data.errors import DataError
from nmoe_data.hydra.client.control import RunOver
from nmoe_data.hydra.client.failures import POLICIES, failure_of_status, redact, retry_after_s
from nmoe_data.hydra.client.limit import AdaptiveLimit
from nmoe_data.hydra.client.settings import JudgeSettings
from nmoe_data.hydra.documents import Document
from nmoe_data.hydra.prompt import PromptSettings
from nmoe_data.hydra.rubric import Rubric
from nmoe_data.hydra.session import Graded, grade_documents

# Kind of fault at the server: status and detail of the label, and how often it is met.
OUTCOMES = {
    "prose": ("unparsable", "prose", 3),
    "prose_refusal": ("refused", "refused", 1),
    "empty": ("unparsable", "empty", 3),
    "wrong_fields": ("unparsable", "wrong_fields", 3),
    "out_of_range": ("unparsable", "out_of_range", 3),
    "boolean": ("unparsable", "wrong_type", 3),
    "float": ("unparsable", "wrong_type", 3),
    "string": ("unparsable", "wrong_type", 3),
    "extra_text": ("unparsable", "prose", 3),
    "prompt_echo": ("unparsable", "prose", 3),
    "two_objects": ("unparsable", "prose", 3),
    "duplicate": ("unparsable", "duplicate_field", 3),
    "reason_first": ("unparsable", "reason_first", 3),
    "fenced": ("scored", "", 0),
    "lone_surrogate": ("scored", "", 0),
    "server_error": ("failed", "server_error", 6),
    "crash": ("failed", "server_error", 6),
    "timeout": ("failed", "timeout", 3),
    "connection": ("failed", "connection", 6),
    "html": ("unparsable", "html", 3),
    "refused": ("refused", "refused", 1),
    "content_filter": ("refused", "content_filter", 1),
    "cut": ("unparsable", "cut", 2),
    "too_long": ("too_long", "too_long", 3),
    "bad_request": ("failed", "bad_request", 1),
    "no_choices": ("unparsable", "no_choices", 3),
}


@pytest.fixture
def grade(server: JudgeServer, judge, tmp_path: Path, code_rubric: Rubric) -> Callable[..., Graded]:
    """Grade documents by one judge at the server."""

    def run(documents: list[Document], **changes: object) -> Graded:
        return grade_documents(documents, [judge(**changes)], code_rubric, tmp_path / "c.sqlite")

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a hundredth of the time between repeats; how long is tested by itself."""
    from nmoe_data.hydra.client.control import RunControl

    sleep = RunControl.sleep
    monkeypatch.setattr(RunControl, "sleep", lambda self, seconds: sleep(self, seconds / 100))


def test_scores_are_those_of_the_judge(server, grade, documents) -> None:
    wanted = documents(60)
    done = grade(wanted)
    assert [label.document_id for label in done.labels] == [document.id for document in wanted]
    assert [label.scores for label in done.labels] == [hidden_scores(d.text) for d in wanted]
    assert all(label.status == "scored" and label.attempts == 1 for label in done.labels)
    assert (done.stopped_by, done.error) == (None, None)
    assert done.usage.prompt_tokens == sum(label.prompt_tokens for label in done.labels)
    assert len(server.payments) == 60


@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_failure_that_stays_has_its_own_name_and_no_score(
    kind: str, server: JudgeServer, grade, documents, quick: None
) -> None:
    server.behaviour.faults = {kind: 0.2}
    wanted = documents(30)
    # Short only where it must pass: a busy machine answers late.
    done = grade(wanted, timeout_s=0.5 if kind == "timeout" else 10.0)
    status, detail, times = OUTCOMES[kind]
    assert len(done.labels) == 30
    hit = [label for d, label in zip(wanted, done.labels, strict=True) if server.fault_of(d.text)]
    assert len(hit) > 1
    assert {(label.status, label.detail) for label in hit} == {(status, detail)}
    if status != "scored":
        assert all(label.scores is None and label.expected is None for label in hit)
        # A repeat under the same key after an answer that was already paid is no new judgement.
        met = server.kinds().total() - (30 - len(hit))
        assert met == times * len(hit)
        assert {label.attempts for label in hit} <= {times, 1}
    others = [label for label in done.labels if label not in hit]
    texts = {d.id: d.text for d in wanted}
    assert all(label.scores == hidden_scores(texts[label.document_id]) for label in others)


def test_all_faults_at_once_are_counted_under_their_names_and_the_run_is_complete(
    server: JudgeServer, grade, documents, quick: None
) -> None:
    server.behaviour.faults = dict.fromkeys(OUTCOMES, 0.03)
    wanted = documents(400)
    done = grade(wanted, timeout_s=0.5)
    faults = [server.fault_of(document.text) for document in wanted]
    assert set(faults) == {*OUTCOMES, None}
    found = [(label.status, label.detail) for label in done.labels]
    assert found == [OUTCOMES[fault][:2] if fault else ("scored", "") for fault in faults]
    for label, document in zip(done.labels, wanted, strict=True):
        assert label.scores == (hidden_scores(document.text) if label.status == "scored" else None)


@pytest.mark.parametrize(
    "kind",
    sorted(
        {*OUTCOMES, "rate_limited"} - {"bad_request", "refused", "prose_refusal", "content_filter"}
    ),
)
def test_a_failure_that_passes_is_made_good(
    kind: str, server: JudgeServer, grade, documents, quick: None
) -> None:
    server.behaviour.faults = {kind: 0.3}
    server.behaviour.fault_times = 1
    server.behaviour.retry_after = "0.01"
    wanted = documents(20)
    done = grade(wanted, timeout_s=1.0)
    texts = {document.id: document.text for document in wanted}
    for label in done.labels:
        assert label.status == "scored"
        cut = kind == "too_long" and label.attempts > 1
        text = texts[label.document_id]
        assert label.scores == hidden_scores(text[: len(text) // 2] if cut else text)


def test_a_request_that_is_repeated_keeps_its_key_and_is_paid_once(
    server: JudgeServer, grade, documents, quick: None
) -> None:
    server.behaviour.faults = {"timeout": 0.5, "server_error": 0.4}
    server.behaviour.fault_times = 1
    done = grade(documents(20), timeout_s=0.5)
    assert all(label.status == "scored" for label in done.labels)
    sent = Counter(request.key for request in server.requests)
    assert len(sent) == len(server.payments) == 20
    assert max(sent.values()) == 2


def test_a_reply_without_a_judgement_is_asked_for_anew_and_warmer(
    server: JudgeServer, grade, documents
) -> None:
    server.behaviour.faults = {"prose": 1.0}
    grade(documents(1))
    assert [request.body["temperature"] for request in server.requests] == [0.0, 0.5, 1.0]
    assert len({request.key for request in server.requests}) == 3


def test_a_reply_that_was_cut_gets_twice_the_room(server: JudgeServer, grade, documents) -> None:
    server.behaviour.faults = {"cut": 1.0}
    server.behaviour.fault_times = 1
    done = grade(documents(1), reply_tokens=100)
    assert [request.body["max_tokens"] for request in server.requests] == [100, 200]
    assert done.labels[0].status == "scored"


def test_a_document_that_is_too_long_is_halved_until_it_fits(
    server: JudgeServer, grade, documents
) -> None:
    server.behaviour.max_characters = 400
    document = documents(1)[0]
    assert len(document.text) == 1500
    done = grade([document])
    assert done.labels[0].scores == hidden_scores(document.text[:375])
    assert server.kinds() == {"context_length_exceeded": 2, "judged": 1}
    server.behaviour.max_characters = 10
    assert grade(documents(2)[1:]).labels[0].status == "too_long"


def test_retry_after_closes_the_gate_for_all_requests(
    server: JudgeServer, grade, documents
) -> None:
    server.behaviour.faults = {"rate_limited": 0.1}
    server.behaviour.fault_times = 1
    server.behaviour.retry_after = "0.8"
    started = time.monotonic()
    done = grade(documents(40))
    assert all(label.status == "scored" for label in done.labels)
    assert server.kinds()["rate_limit_exceeded"] >= 1
    assert server.early == 0
    assert time.monotonic() - started > 0.8


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "12"}, 12.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_understood(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


def test_retry_after_may_be_a_date() -> None:
    later, earlier = (formatdate(time.time() + by, usegmt=True) for by in (300, -300))
    assert retry_after_s({"retry-after": later}) == pytest.approx(300.0, abs=5.0)
    assert retry_after_s({"retry-after": earlier}) == 0.0


def test_a_retry_after_of_nothing_is_no_leave_to_ask_at_once(server, grade, documents) -> None:
    server.behaviour.faults = {"rate_limited": 1.0}
    server.behaviour.fault_times = 1
    server.behaviour.retry_after = "0"
    assert grade(documents(1)).labels[0].status == "scored"
    first, second = server.requests
    assert second.time_s - first.time_s > 0.4


def test_a_server_that_asks_to_wait_for_hours_ends_the_run(server, grade, documents) -> None:
    server.behaviour.faults = {"rate_limited": 1.0}
    server.behaviour.retry_after = "7200"
    done = grade(documents(3))
    assert done.error is not None
    assert done.error.code == "E-HYDRA-RATE"
    assert "7,200 s" in str(done.error)


def test_waiting_times_double_up_to_the_longest_and_are_spread() -> None:
    policy = POLICIES["server_error"]
    assert [policy.delay_s(n, 1.0) for n in (1, 2, 3, 7, 20)] == [0.5, 1.0, 2.0, 30.0, 30.0]
    assert policy.delay_s(3, 0.0) == 1.0


def test_a_spent_quota_stops_the_run_and_loses_nothing(server, grade, documents) -> None:
    server.behaviour.quota = 25
    wanted = documents(60)
    done = grade(wanted, concurrency=4)
    assert done.stopped_by == "failed"
    assert done.error is not None
    assert done.error.code == "E-HYDRA-QUOTA"
    assert "\n" not in str(done.error)
    assert len(done.labels) == len(server.payments) == 25
    assert server.kinds()["insufficient_quota"] <= 4
    server.behaviour.quota = 1000
    assert len(grade(wanted).labels) == 60
    assert len(server.payments) == 60


def test_a_wrong_key_stops_the_run_at_once(
    server, grade, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-wrong-canary")
    server.behaviour.api_key = "sk-right"
    done = grade(documents(50), key_variable="JUDGE_KEY", concurrency=2)
    assert done.error is not None
    assert done.error.code == "E-HYDRA-UNAUTHORIZED"
    assert "canary" not in str(done.error)
    assert "HTTP 401" in str(done.error)
    assert done.labels == []
    monkeypatch.setenv("JUDGE_KEY", "sk-right")
    assert len(grade(documents(5), key_variable="JUDGE_KEY").labels) == 5


@pytest.mark.parametrize("value", [None, "", "ключ", "a\nb"])
def test_a_key_that_is_missing_or_cannot_be_one_is_one_line(
    value: str | None, grade, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(DataError, match=r"E-HYDRA-KEY: .*JUDGE_KEY") as error:
        grade(documents(1), key_variable="JUDGE_KEY")
    assert not value or value not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [{"base_url": "http://127.0.0.1:9/v1"}, {"base_url": "http://no.such.host.invalid/v1"}],
    ids=["closed port", "unknown host"],
)
def test_where_nobody_listens_the_run_ends_soon(change, grade, documents) -> None:
    started = time.monotonic()
    done = grade(documents(40), **change)
    assert done.error is not None
    assert done.error.code == "E-HYDRA-NO-REPLY"
    assert "connection" in str(done.error)
    assert time.monotonic() - started < 20.0


def test_a_server_that_refuses_every_request_ends_the_run_with_its_words(
    server, grade, documents
) -> None:
    server.behaviour.schema = False
    done = grade(documents(100))
    assert done.error is not None
    assert done.error.code == "E-HYDRA-NO-REPLY"
    assert "response_format json_schema is not supported" in str(done.error)
    assert "--no-schema" in str(done.error)
    assert len(server.requests) < 60
    assert len(grade(documents(10), schema=False).labels) == 10


def test_expected_scores_come_from_the_log_probabilities(server, grade, documents) -> None:
    done = grade(documents(10), logprobs=True)
    for label in done.labels:
        near = [0.8 * s + 0.2 * (s + (1 if s < 3 else -1)) for s in label.scores]
        assert label.expected == pytest.approx(near, abs=1e-6)
    server.behaviour.logprobs = False
    assert all(label.expected is None for label in grade(documents(20), logprobs=True).labels[10:])


def test_concurrency_settles_at_what_the_server_takes(server, grade, documents) -> None:
    server.behaviour.slots = 12
    server.behaviour.latency_s = 0.03
    server.behaviour.retry_after = None
    done = grade(documents(600), concurrency=128)
    assert all(label.status == "scored" for label in done.labels)
    kinds = server.kinds()
    # Without adaptation nearly every request would be refused many times.
    assert kinds["rate_limit_exceeded"] < 0.25 * kinds["judged"]


def simulated(
    limit: AdaptiveLimit, slots: int, service_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Play a server that serves `slots` requests at once, each for its time, on its own clock."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    free_at = [0.0] * slots
    under_way: list[tuple[float, float]] = []
    for seconds in service_s:
        while limit.under_way < int(limit.limit):
            entered = asyncio.run(limit.enter())
            slot = free_at.index(min(free_at))
            free_at[slot] = max(free_at[slot], entered) + seconds
            under_way.append((free_at[slot], entered))
        under_way.sort(reverse=True)
        now, entered = under_way.pop()
        limit.answered(entered)
        limit.leave()


@pytest.mark.parametrize("slots", [8, 40])
def test_a_queue_on_the_other_side_stops_the_growth(slots: int, monkeypatch) -> None:
    limit = AdaptiveLimit(512, asyncio.sleep)
    simulated(limit, slots, [0.05] * 8000, monkeypatch)
    assert slots <= limit.limit <= 6 * slots


def test_a_server_that_becomes_slow_is_not_taken_for_a_queue(monkeypatch) -> None:
    limit = AdaptiveLimit(100, asyncio.sleep)
    simulated(limit, 10_000, [0.05] * 3000 + [0.5] * 3000, monkeypatch)
    assert limit.limit > 50


def test_without_a_queue_concurrency_grows_to_the_most_allowed(monkeypatch) -> None:
    limit = AdaptiveLimit(200, asyncio.sleep)
    simulated(limit, 10_000, [0.05] * 3000, monkeypatch)
    assert limit.limit == 200


def test_refusals_of_one_moment_halve_the_limit_once(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limit = AdaptiveLimit(512, asyncio.sleep)
    entered = [asyncio.run(limit.enter()) for _ in range(8)]
    now = 100.5
    for time_s in entered:
        limit.refused(time_s, None)
        limit.leave()
    assert limit.limit == 4
    later = asyncio.run(limit.enter())
    now = 101.0
    limit.refused(later, 3.0)
    assert limit.limit == 2
    assert limit.closed_s == 3.0


def test_nobody_stays_waiting_at_a_closed_gate_when_the_run_ends() -> None:
    async def ends() -> list[BaseException | float]:
        over = asyncio.Event()

        async def sleep(seconds: float) -> None:
            await over.wait()
            raise RunOver

        limit = AdaptiveLimit(1, sleep)
        entered_s = await limit.enter()
        waiting = [asyncio.create_task(limit.enter()) for _ in range(20)]
        await asyncio.sleep(0)
        limit.refused(entered_s, 60.0)
        limit.leave()
        await asyncio.sleep(0)
        over.set()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5.0)

    assert [type(end) for end in asyncio.run(ends())] == [RunOver] * 20


def test_status_codes_have_their_classes() -> None:
    def kind(status: int, message: str = "", code: str | None = None) -> str:
        body = {"error": {"message": message, "code": code}}
        return failure_of_status(status, body, {}, []).kind

    assert kind(429) == "rate_limited"
    assert kind(429, code="insufficient_quota") == "quota"
    assert kind(402) == "quota"
    assert (kind(401), kind(403)) == ("unauthorized", "unauthorized")
    assert {kind(status) for status in (408, 500, 502, 503, 529)} == {"server_error"}
    assert kind(400, "This model's maximum context length is 8192 tokens") == "too_long"
    assert kind(400, "the request exceeds the available context size") == "too_long"
    assert kind(413) == "too_long"
    assert kind(400, code="content_filter") == "content_filter"
    assert (kind(400, "bad temperature"), kind(404), kind(422)) == ("bad_request",) * 3
    for body in ("<html>", None, [], {"error": "text"}, {"error": None}, {"detail": "x"}):
        assert failure_of_status(500, body, {}, []).kind == "server_error"


def test_a_message_that_repeats_headers_is_not_shown() -> None:
    body = {"error": {"message": "bad: {'Authorization': 'Bearer [key]', 'x-stainless-lang': 'p'}"}}
    assert failure_of_status(400, body, {}, []).message == "HTTP 400"


def test_messages_are_one_short_line_without_secrets() -> None:
    body = {"error": {"message": "key sk-abc\nis wrong " + "x" * 1000}}
    failure = failure_of_status(400, body, {}, ["sk-abc"])
    assert failure.message.startswith("HTTP 400 key [key] is wrong")
    assert len(failure.message) < 310
    assert redact("a sk-abc b sk-abc", ["sk-abc"]) == "a [key] b [key]"


@pytest.mark.parametrize(
    "url", ["ftp://secret/v1", "secret:8000", "https:secret", "http://secret:x/"]
)
def test_a_base_url_that_is_none_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(DataError, match="E-ARGUMENT") as error:
        JudgeSettings("j", "m", base_url=url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["price_in", "price_out"])
def test_a_price_that_would_defeat_a_budget_is_refused(side: str, price: float) -> None:
    with pytest.raises(DataError, match="E-ARGUMENT: the prices of the judge j"):
        JudgeSettings("j", "m", **{"price_in": 1.0, "price_out": 1.0, side: price})


def test_a_password_in_the_base_url_is_neither_in_the_host_nor_in_the_repr() -> None:
    settings = JudgeSettings("j", "m", base_url="https://user:secret@host:81/v1?k=hidden")
    assert settings.host == "host:81"
    assert "secret" not in repr(settings)
    assert "hidden" not in repr(settings)


def test_one_process_keeps_many_requests_under_way(server, grade, documents) -> None:
    server.behaviour.latency_s = 0.05
    done = grade(documents(300))
    assert all(label.status == "scored" for label in done.labels)
    assert statistics.median(label.latency_s for label in done.labels) >= 0.05
    # 200 requests a second, each 50 ms long, are 10 at once; infra/bench/hydra_client.py counts.
    assert server.most_open >= 16


def test_the_plain_prompt_reaches_the_judge_too(
    server, judge, documents, code_rubric, tmp_path: Path
) -> None:
    prompts = PromptSettings(defended=False)
    done = grade_documents(
        documents(5), [judge()], code_rubric, tmp_path / "c.sqlite", prompts=prompts
    )
    assert [label.scores for label in done.labels] == [hidden_scores(d.text) for d in documents(5)]


@pytest.mark.parametrize(
    ("models", "limits", "what"),
    [
        ([], {}, "none"),
        (["m", "m"], {}, "no model twice"),
        (["m"], {"max_cost": 1.0}, "needs prices"),
        (["m"], {"max_tokens": 0}, "max-tokens is 0"),
        (["m"], {"max_cost": -1.0}, "max-cost is -1.0"),
        (["m"], {"max_cost": float("nan")}, "max-cost is nan"),
    ],
)
def test_wrong_arguments_are_one_line(models, limits, what, judge, code_rubric, tmp_path) -> None:
    judges = [judge(model=model) for model in models]
    with pytest.raises(DataError, match="E-ARGUMENT") as error:
        grade_documents([], judges, code_rubric, tmp_path / "c.sqlite", **limits)
    assert what in str(error.value)
