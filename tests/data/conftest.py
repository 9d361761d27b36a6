"""What the tests of nmoe-data share: seeded documents, a command runner, a look at a whole tree."""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from nmoe_data.cli import main

WORDS = "the,router,sends,a,token,to,some,experts,naïve,café,日本語,emoji🙂,x,=,f(y),\n,\t"


@dataclass(frozen=True)
class Outcome:
    """What a command printed and returned."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run `nmoe-data ARGUMENTS...` in this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["nmoe-data", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return Outcome(int(end.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def make_texts() -> Callable[..., list[str]]:
    """Make seeded documents of 5 to 60 words."""

    def make(count: int, seed: int = 0) -> list[str]:
        draw = random.Random(seed)
        return [
            f"{number}: " + " ".join(draw.choices(WORDS.split(","), k=draw.randint(5, 60)))
            for number in range(count)
        ]

    return make


@pytest.fixture
def write_jsonl() -> Callable[[Path, list[str]], Path]:
    """Write documents as JSON lines."""

    def write(path: Path, texts: list[str]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts))
        path.write_text("".join(lines))
        return path

    return write


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, bytes]]:
    """Return every file below a folder with its bytes."""

    def read(folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    return read


@pytest.fixture
def rejected() -> Callable[[Path], list[tuple[str, int, str]]]:
    """Return (file name, offset, reason) of each line of a run's rejected.jsonl."""

    def read(out: Path) -> list[tuple[str, int, str]]:
        rows = map(json.loads, (out / "rejected.jsonl").read_text().splitlines())
        return [(row["source"].rsplit("/", 1)[-1], row["offset"], row["reason"]) for row in rows]

    return read
