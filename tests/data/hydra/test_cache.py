"""The request cache: on disk before it counts, by content, never a failure."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
from nmoe_data.errors import DataError
from nmoe_data.hydra.client import RequestCache, StoredReply, Usage
from nmoe_data.hydra.client.cache import request_key
from nmoe_data.hydra.documents import Document
from nmoe_data.hydra.session import grade_documents

REPLY = StoredReply(
    content='{"a": "naïve 🙂"}',
    refusal=None,
    finish_reason="stop",
    logprobs=[{"token": "a", "top_logprobs": [{"token": "a", "logprob": -0.5}]}],
    usage=Usage(100, 20, 0.25),
    latency_s=0.125,
    attempts=3,
)


def test_a_stored_reply_is_found_again_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    with RequestCache(path) as cache:
        assert cache.get("k") is None
        asyncio.run(cache.put("k", "m", REPLY))
        assert cache.get("k") == REPLY
    with RequestCache(path) as cache:
        assert cache.get("k") == REPLY
        assert cache.get("other") is None
        assert cache.spent() == REPLY.usage
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c.sqlite"]


def test_put_returns_only_when_another_connection_sees_the_reply(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"

    async def put_and_look(cache: RequestCache, number: int) -> bool:
        await cache.put(str(number), "m", REPLY)
        with sqlite3.connect(path) as other:
            rows = other.execute("SELECT key FROM replies WHERE key = ?", (str(number),))
            return rows.fetchone() is not None

    async def all_at_once(cache: RequestCache) -> list[bool]:
        return await asyncio.gather(*(put_and_look(cache, number) for number in range(200)))

    with RequestCache(path) as cache:
        assert all(asyncio.run(all_at_once(cache)))
        assert cache.spent() == Usage(20_000, 4000, 50.0)


def test_a_reply_stored_twice_is_paid_once(tmp_path: Path) -> None:
    with RequestCache(tmp_path / "c.sqlite") as cache:
        for _ in range(2):
            asyncio.run(cache.put("k", "m", REPLY))
        assert cache.spent() == REPLY.usage


def test_the_key_follows_from_content_and_attempt_alone() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    key = request_key(body, 0)
    assert key == request_key(dict(reversed(body.items())), 0)
    assert key != request_key(body, 1)
    assert key != request_key({**body, "model": "n"}, 0)
    assert key != request_key({**body, "temperature": 0.5}, 0)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(DataError, match="E-HYDRA-CACHE"):
        RequestCache(path)
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE replies (a)")
    other.close()
    with (
        RequestCache(tmp_path / "other.sqlite") as cache,
        pytest.raises(DataError, match="E-HYDRA"),
    ):
        cache.get("k")


def test_a_full_disk_ends_the_run_with_one_line(
    server, judge, documents, code_rubric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = RequestCache._connect

    def small(self: RequestCache) -> sqlite3.Connection:
        connection = connect(self)
        connection.execute("PRAGMA max_page_count = 12")
        return connection

    monkeypatch.setattr(RequestCache, "_connect", small)
    done = grade_documents(documents(300), [judge()], code_rubric, tmp_path / "c.sqlite")
    assert done.error is not None
    assert done.error.code == "E-DISK-FULL"
    # What was answered before is kept and labelled, the rest is not counted.
    assert 0 < len(done.labels) < 300
    monkeypatch.setattr(RequestCache, "_connect", connect)
    with RequestCache(tmp_path / "c.sqlite") as cache:
        stored = [r for r in server.requests if r.key and cache.get(r.key) is not None]
    assert len(stored) == len(done.labels)


@pytest.mark.parametrize(
    "kind", ["server_error", "html", "no_choices", "connection", "bad_request"]
)
def test_a_failed_request_is_never_stored(
    kind: str, server, judge, documents, code_rubric, tmp_path: Path
) -> None:
    server.behaviour.faults = {kind: 0.5}
    server.behaviour.fault_times = 1
    path = tmp_path / "c.sqlite"
    grade_documents(documents(10), [judge()], code_rubric, path)
    with RequestCache(path) as cache:
        for request in server.requests:
            stored = cache.get(request.key)
            assert stored is None or "helpfulness" in (stored.content or "")
        assert cache.spent().prompt_tokens > 0


def test_a_second_run_asks_nothing_and_gives_the_same_labels(
    server, judge, documents, code_rubric, tmp_path: Path
) -> None:
    server.behaviour.faults = {"prose": 0.2, "cut": 0.2, "refused": 0.2}
    first = grade_documents(documents(40), [judge()], code_rubric, tmp_path / "c.sqlite")
    sent = len(server.requests)
    second = grade_documents(documents(40), [judge()], code_rubric, tmp_path / "c.sqlite")
    assert second.labels == first.labels
    assert second.usage == first.usage
    assert len(server.requests) == sent


def test_a_change_of_prompt_rubric_or_model_is_asked_anew(
    server, judge, documents, code_rubric, tmp_path: Path
) -> None:
    from nmoe_data.hydra.prompt import PromptSettings
    from nmoe_data.hydra.rubric import load_rubric

    def run(wanted: list[Document], rubric=code_rubric, prompts=PromptSettings(), **changes) -> int:  # noqa: B008
        before = len(server.requests)
        cache = tmp_path / "c.sqlite"
        grade_documents(wanted, [judge(**changes)], rubric, cache, prompts=prompts)
        return len(server.requests) - before

    wanted = documents(5)
    assert run(wanted) == 5
    assert run(wanted) == 0
    assert run(wanted, rubric=load_rubric("prose")) == 5
    assert run(wanted, prompts=PromptSettings(seed=1)) == 5
    assert run(wanted, model="n") == 5
    assert run(wanted, concurrency=1, timeout_s=9.0, price_in=1.0) == 0
