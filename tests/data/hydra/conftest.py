"""What the tests of HYDRA share: a judge on loopback, real text, labels made by the real job."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from judge_server import Behaviour, JudgeServer
from nmoe_data.hydra.client.settings import JudgeSettings
from nmoe_data.hydra.documents import Document, document_id, stratum_of
from nmoe_data.hydra.rubric import Rubric, load_rubric
from real_text import PIECE_CHARACTERS, stdlib_pieces


def whole_pieces(count: int) -> list[str]:
    """The first of the pieces that are all of one length."""
    return [text for text in stdlib_pieces() if len(text) == PIECE_CHARACTERS][:count]


def as_document(text: str) -> Document:
    return Document(document_id(text), text, "pieces", 0, stratum_of("pieces", text))


@pytest.fixture
def documents() -> Callable[[int], list[Document]]:
    """Return the first of the pieces as documents."""
    return lambda count: [as_document(text) for text in whole_pieces(count)]


@pytest.fixture
def pieces_file(tmp_path: Path, write_jsonl) -> Callable[[int], Path]:
    """Write the first of the pieces as JSON lines and return the path."""
    return lambda count: write_jsonl(tmp_path / "pieces.jsonl", whole_pieces(count))


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """A judge without noise; its behaviour may be changed."""
    with JudgeServer(Behaviour(noise=0.0)) as running:
        yield running


@pytest.fixture
def judge(server: JudgeServer) -> Callable[..., JudgeSettings]:
    """Return the settings of a judge at the server."""

    def settings(**changes: object) -> JudgeSettings:
        given = {"name": "judge", "model": "m", "base_url": server.base_url, "key_variable": None}
        return JudgeSettings(**{**given, **changes})

    return settings


@pytest.fixture
def start_label(server: JudgeServer) -> Callable[..., subprocess.Popen[str]]:
    """Start `nmoe-data hydra label SOURCE --out OUT` as a process, its judge at the server."""

    def start(source: Path, out: Path, **environment: str) -> subprocess.Popen[str]:
        key = ["--api-key-env", "JUDGE_KEY"] if "JUDGE_KEY" in environment else ["--no-key"]
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "nmoe_data", "hydra", "label", str(source)),
                *("--out", str(out), "--rubric", "code", "--model", "m"),
                *("--base-url", server.base_url, "--timeout", "5", *key),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    return start


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition, two minutes at most."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120.0
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def code_rubric() -> Rubric:
    return load_rubric("code")
