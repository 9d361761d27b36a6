"""No key and no header reaches an output, a log, an error or a file, whatever goes wrong."""

import asyncio
import signal
import sqlite3
import traceback
from pathlib import Path

import pytest
import zstandard
from judge_server import KINDS, JudgeServer, problem
from nmoe_data.hydra.client import JudgeSettings, Transport, Usage
from nmoe_data.hydra.client.failures import RequestFailure

CANARY = "sk-canary-0123456789abcdef"


def texts_in(folder: Path) -> bytes:
    """Everything in the files of a folder, compressed replies unpacked."""
    found = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    with sqlite3.connect(folder / "requests.sqlite") as cache:
        for key, model, reply in cache.execute("SELECT key, model, reply FROM replies"):
            found += key.encode() + model.encode() + zstandard.decompress(reply)
    cache.close()
    return found


def assert_clean(text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    assert CANARY.encode() not in content
    assert b"Bearer" not in content
    assert b"authorization" not in content.lower()


@pytest.mark.slow
@pytest.mark.parametrize("log", ["", "debug"], ids=["plain", "client logs debug"])
def test_the_key_shows_nowhere_in_any_failure(
    log: str, server: JudgeServer, start_label, pieces_file, tmp_path: Path
) -> None:
    kinds = [kind for kind in KINDS if kind not in ("quota", "unauthorized", "timeout")]
    server.behaviour.api_key = CANARY
    server.behaviour.faults = dict.fromkeys(kinds, 1 / len(kinds))
    server.behaviour.fault_times = 1
    server.behaviour.retry_after = "0.05"
    run = start_label(pieces_file(150), tmp_path / "out", JUDGE_KEY=CANARY, OPENAI_LOG=log)
    printed, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    assert set(server.kinds()) > {"crash", "server_error", "html", "judged"}
    assert_clean(printed + errors)
    assert_clean(texts_in(tmp_path / "out"))


@pytest.mark.parametrize(
    "kind", ["quota", "unauthorized", "crash", "server_error", "bad_request", "connection"]
)
def test_the_key_shows_nowhere_when_a_failure_ends_the_run(
    kind: str, server: JudgeServer, start_label, until, pieces_file, tmp_path: Path
) -> None:
    server.behaviour.api_key = CANARY
    server.behaviour.faults = {kind: 1.0}
    run = start_label(pieces_file(20), tmp_path / "out", JUDGE_KEY=CANARY, OPENAI_LOG="debug")
    if kind in ("crash", "server_error", "connection"):
        # It would be given up after half a minute; what is printed until now is enough.
        until(lambda: len(server.requests) > 20)
        run.send_signal(signal.SIGINT)
    printed, errors = run.communicate(timeout=60)
    assert run.returncode != 0
    assert server.requests
    assert_clean(printed + errors)
    assert_clean(texts_in(tmp_path / "out"))


def test_a_judge_that_repeats_the_key_is_stored_without_it(
    server: JudgeServer, start_label, pieces_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = JudgeServer._completion

    def repeating(self, content, body, **named):
        return completion(self, content.replace("By rule.", f"Your key: {CANARY}"), body, **named)

    monkeypatch.setattr(JudgeServer, "_completion", repeating)
    server.behaviour.api_key = CANARY
    run = start_label(pieces_file(5), tmp_path / "out", JUDGE_KEY=CANARY)
    assert run.wait(60) == 0
    run.communicate()
    content = texts_in(tmp_path / "out")
    assert b"[key]" in content
    assert_clean(content)


@pytest.mark.parametrize("status", [200, 400, 401, 404, 429, 500, None])
def test_no_exception_holds_the_key_in_its_text_its_chain_or_its_frames(
    status: int | None, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    server.behaviour.faults = {"html" if status == 200 else "connection": 1.0}
    if status not in (200, None):
        answer = problem(status, "oops", f"Incorrect API key provided: Bearer {CANARY}")
        monkeypatch.setattr(JudgeServer, "_judge", lambda *arguments: answer)
    judge = JudgeSettings("j", "m", server.base_url, key_variable="JUDGE_KEY")
    prompt = [{"role": "user", "content": "<document>\nx\n</document>"}]

    async def ask() -> RequestFailure:
        transport = Transport(judge)
        with pytest.raises(RequestFailure) as failure:
            await transport.ask({"model": "m", "messages": prompt}, "key", Usage())
        await transport.close()
        return failure.value

    failure = asyncio.run(ask())
    assert failure.__cause__ is None
    assert failure.__context__ is None or failure.__suppress_context__
    shown = [repr(failure), str(failure), repr(vars(failure)), repr(judge)]
    shown += traceback.TracebackException.from_exception(failure, capture_locals=True).format()
    assert CANARY not in "".join(shown)
