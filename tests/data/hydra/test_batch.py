"""The batch interface: found again after a kill, never paid twice, the rest goes on live."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from judge_server import Answer, JudgeServer, hidden_scores
from nmoe_data.hydra import batches
from nmoe_data.hydra.client.control import RunControl
from nmoe_data.hydra.documents import Document
from nmoe_data.hydra.labels import Label
from nmoe_data.hydra.prompt import PromptSettings
from nmoe_data.hydra.session import open_session

PROMPTS = PromptSettings()


class Killed(BaseException):
    """Stands for a SIGKILL: nothing in the program catches it."""


@pytest.fixture
def fill(judge, code_rubric, tmp_path: Path) -> Callable[..., RunControl]:
    """Run the batches of some documents, without the live part."""

    def run(documents: list[Document], models=("m",), limits=(), progress=None) -> RunControl:
        async def work() -> RunControl:
            judges = [judge(model=model, name=model) for model in models]
            cache = tmp_path / "c.sqlite"
            async with open_session(judges, code_rubric, cache, **dict(limits)) as session:
                await batches.fill_from_batches(
                    session, documents, PROMPTS, tmp_path, progress, poll_s=0.02
                )
                return session.control

        return asyncio.run(work())

    return run


@pytest.fixture
def live(judge, code_rubric, tmp_path: Path) -> Callable[..., list[Label]]:
    """Grade live with the same cache."""

    def run(documents: list[Document], models=("m",)) -> list[Label]:
        async def work() -> list[Label]:
            judges = [judge(model=model, name=model) for model in models]
            async with open_session(judges, code_rubric, tmp_path / "c.sqlite") as session:
                return await session.grade(documents, PROMPTS)

        return asyncio.run(work())

    return run


def right(documents: list[Document]) -> list[tuple[int, ...]]:
    return [hidden_scores(document.text) for document in documents]


def test_replies_of_a_batch_are_matched_to_their_documents(server, fill, live, documents) -> None:
    wanted = documents(30)
    shown = []
    control = fill(wanted, progress=shown.append)
    assert (control.stopped_by, control.replies) == (None, 30)
    assert len(server.batches) == 1
    labels = live(wanted)
    assert [label.scores for label in labels] == right(wanted)
    assert len(server.requests) == len(server.payments) == 30
    assert [progress.state for progress in shown] == ["in_progress", "completed"]


def test_a_second_run_sends_no_second_batch(server, fill, documents) -> None:
    fill(documents(10))
    fill(documents(10))
    assert len(server.batches) == 1
    fill(documents(15))
    assert len(server.batches) == 2
    assert len(server.requests) == len(server.payments) == 15


def test_several_judges_and_full_files_make_several_batches(
    server, fill, live, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_REQUESTS", 4)
    wanted = documents(10)
    fill(wanted, models=("m", "n"))
    assert len(server.batches) == 6
    labels = live(wanted, models=("m", "n"))
    assert [label.scores for label in labels if label.model == "n"] == right(wanted)
    assert len(server.requests) == 20
    monkeypatch.setattr(batches, "MAX_REQUESTS", 50_000)
    monkeypatch.setattr(batches, "MAX_BYTES", 30_000)
    fill(documents(20)[10:])
    assert all(len(content) < 30_000 for content in server.files.values())


def test_a_batch_that_expired_keeps_what_it_finished_and_the_rest_goes_live(
    server, fill, live, documents
) -> None:
    server.behaviour.batch_share = 0.5
    wanted = documents(40)
    control = fill(wanted)
    assert control.events["batch_expired"] == 40 - control.replies
    assert 8 < control.replies < 32
    # What a batch did not do is not sent by another one.
    fill(wanted)
    assert len(server.batches) == 1
    assert [label.scores for label in live(wanted)] == right(wanted)
    assert len(server.payments) == len(server.requests) == 40
    assert len(server.batches) == 1


def test_failures_inside_a_batch_are_counted_and_left_to_the_live_run(
    server, fill, live, documents
) -> None:
    server.behaviour.faults = {"server_error": 0.3, "refused": 0.2, "bad_request": 0.2}
    server.behaviour.fault_times = 1
    wanted = documents(60)
    control = fill(wanted)
    kinds = [server.fault_of(document.text) for document in wanted]
    assert control.events["server_error"] == kinds.count("server_error") > 0
    assert control.events["bad_request"] == kinds.count("bad_request") > 0
    labels = live(wanted)
    statuses = [label.status for label in labels]
    assert statuses == ["refused" if kind == "refused" else "scored" for kind in kinds]


@pytest.mark.parametrize("call", ["_send", "_update", "_wait", "_download", "_store"])
def test_a_run_killed_at_any_step_pays_nothing_twice(
    call: str, server, fill, live, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = documents(12)
    original = getattr(batches.BatchRun, call)
    calls = 0

    def die(self, *arguments):
        nonlocal calls
        calls += 1
        # The first _update records the file; the second, the number of the batch.
        if calls == (2 if call == "_update" else 1):
            raise Killed
        return original(self, *arguments)

    monkeypatch.setattr(batches.BatchRun, call, die)
    with pytest.raises(Killed):
        fill(wanted)
    monkeypatch.setattr(batches.BatchRun, call, original)
    assert fill(wanted).stopped_by is None
    assert len(server.batches) == 1
    assert [label.scores for label in live(wanted)] == right(wanted)
    assert len(server.requests) == len(server.payments) == 12


def test_documents_of_a_batch_under_way_are_in_no_second_one(
    server, fill, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments):
        raise Killed

    monkeypatch.setattr(batches.BatchRun, "_wait", die)
    with pytest.raises(Killed):
        fill(documents(8))
    monkeypatch.undo()
    fill(documents(12))
    assert [len(content.splitlines()) for content in server.files.values()][:2] == [8, 4]
    assert len(server.requests) == len(server.payments) == 12


def test_a_run_killed_between_creating_a_batch_and_noting_it_finds_it_again(
    server, fill, documents, tmp_path: Path
) -> None:
    wanted = documents(8)
    server.behaviour.batch_polls = 1 << 30

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    assert fill(wanted, progress=stop).stopped_by == "interrupted"
    state = tmp_path / "batches.json"
    content = json.loads(state.read_text())
    assert content["batches"][0]["id"] == "batch-0"
    content["batches"][0]["id"] = None
    state.write_text(json.dumps(content))
    server.behaviour.batch_polls = 2
    for batch in server.batches.values():
        batch["polls"] = 0
    fill(wanted)
    assert len(server.batches) == len(server.files) - 1 == 1
    assert len(server.payments) == 8


def test_the_budget_holds_for_the_worst_case_of_a_batch(server, fill, live, documents) -> None:
    control = fill(documents(40), limits={"max_tokens": 60_000})
    assert 0 < control.replies < 40
    used = sum(
        sum(len(m["content"].encode()) for m in request.body["messages"]) // 4 + 30
        for request in server.requests
    )
    assert used <= 60_000


def test_a_batch_that_the_server_refuses_whole_is_one_line(
    server: JudgeServer, fill, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: JudgeServer, batch: dict) -> None:
        batch["status"] = "failed"
        error = {"code": "token_limit", "message": "too many enqueued tokens", "line": None}
        batch["errors"] = {"object": "list", "data": [error]}

    monkeypatch.setattr(JudgeServer, "_finish", refuse)
    control = fill(documents(3))
    assert control.error is not None
    assert control.error.code == "E-HYDRA-BATCH"
    assert "too many enqueued tokens" in str(control.error)


def test_a_server_without_a_batch_interface_is_one_line(
    server: JudgeServer, fill, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    from judge_server import problem

    missing = problem(404, "not_found", "no such path")
    monkeypatch.setattr(JudgeServer, "_batch_route", lambda *arguments: missing)
    control = fill(documents(3))
    assert control.error is not None
    assert control.error.code == "E-HYDRA-BATCH"
    assert "no such path" in str(control.error)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("kind", ["text/html", "application/json"])
def test_a_server_that_answers_something_else_is_one_line(
    kind: str, method: str, server: JudgeServer, fill, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"<!doctype html>" if kind == "text/html" else b'{"error": {"message": "none"}}'
    page = Answer(200, body, {"content-type": kind})
    route = JudgeServer._batch_route

    def answer(self: JudgeServer, asked: str, *arguments: object) -> Answer:
        return page if asked == method else route(self, asked, *arguments)

    monkeypatch.setattr(JudgeServer, "_batch_route", answer)
    control = fill(documents(3))
    assert control.error is not None
    assert control.error.code == "E-HYDRA-BATCH"


def test_a_damaged_line_of_a_result_is_counted_and_its_document_goes_live(
    server, fill, live, documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = batches.BatchRun._store

    async def damaged(self, transport, batch, content: bytes):
        first, *rest = content.splitlines(keepends=True)
        return await store(self, transport, batch, first[:20] + b"\n" + b"{}\n" + b"".join(rest))

    monkeypatch.setattr(batches.BatchRun, "_store", damaged)
    wanted = documents(6)
    control = fill(wanted)
    assert (control.events["damaged_line"], control.replies) == (2, 5)
    assert [label.scores for label in live(wanted)] == right(wanted)


def test_a_batch_of_a_judge_that_is_not_named_is_not_forgotten(server, fill, documents) -> None:
    server.behaviour.batch_polls = 1 << 30

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    fill(documents(3), models=("n",), progress=stop)
    control = fill(documents(3), models=("m",), progress=stop)
    assert control.error is not None
    assert "judge n is under way" in str(control.error)
