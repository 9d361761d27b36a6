"""Killed at any instant and started again, a filter run ends with the same bytes."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nmoe_data.hydra.filter.parts as parts
import nmoe_data.hydra.filter.plan as plan
import nmoe_data.hydra.filter.work as work
import pytest
import zstandard
from hydra_heads import make_heads
from inline_executor import inline
from kills import die_before_call, in_child, kill_until_done
from nmoe_data.errors import DataError
from nmoe_data.hydra.filter import FilterSettings, filter_corpus
from nmoe_data.hydra.filter.chunkfile import ChunkResult, read_chunk, write_chunk

__all__ = ["inline"]

Tree = Callable[[Path], dict[str, bytes]]
# How the command is started with small chunks and parts.
STARTER = (
    "import sys; sys.argv[0] = 'nmoe-data'\n"
    "import nmoe_data.hydra.filter.plan as plan, nmoe_data.hydra.filter.parts as parts\n"
    "plan.CHUNK_BYTES, parts.PART_DOCUMENTS = 6000, 80\n"
    "from nmoe_data.cli import main\n"
    "if __name__ == '__main__': main()\n"
)


@pytest.fixture
def folder(tmp_path: Path, make_texts, write_jsonl) -> Path:
    """Plain and compressed JSONL with bad lines, a text file, a binary, and heads for them."""
    texts = make_texts(240)
    write_jsonl(tmp_path / "in" / "a.jsonl", texts[:90])
    with (tmp_path / "in" / "a.jsonl").open("ab") as file:
        file.write(b"[]\n{\n")
    write_jsonl(tmp_path / "in" / "b.jsonl", texts[90:239])
    data = (tmp_path / "in" / "b.jsonl").read_bytes()
    (tmp_path / "in" / "b.jsonl").unlink()
    (tmp_path / "in" / "b.jsonl.zst").write_bytes(zstandard.compress(data))
    (tmp_path / "in" / "c.txt").write_text(texts[239])
    (tmp_path / "in" / "d.txt").write_bytes(b"\0")
    make_heads(tmp_path / "heads", texts)
    return tmp_path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 6000)
    monkeypatch.setattr(parts, "PART_DOCUMENTS", 80)


def command(folder: Path, out: str = "out", *more: str) -> list[str]:
    """The command line of a run in `folder`."""
    arguments = ["hydra", "filter", "in", "--heads", "heads", "--out", out, *more]
    starter = folder / "start.py"
    starter.write_text(STARTER)
    return [sys.executable, str(starter), *arguments]


def results(tree: Tree, out: Path) -> dict[str, bytes]:
    """All files of a finished run but the one that says how long it took."""
    found = tree(out)
    assert found.pop("timing.json")
    assert {name.split("/")[0] for name in found} == {
        "kept",
        "scores",
        "dropped.jsonl",
        "rejected.jsonl",
        "filter.json",
    }
    return found


def start(folder: Path, kill_at: int, out: str = "out") -> int:
    """Run in a child that dies before its n-th durable step (0: never); its exit status."""

    def run() -> None:
        os.chdir(folder)
        die_before_call(kill_at)
        filter_corpus("in", Path("heads"), Path(out), FilterSettings(workers=2))

    return in_child(run)


@pytest.mark.usefixtures("inline")
def test_killed_once_before_any_durable_step_the_next_start_finishes(
    folder: Path, tree: Tree
) -> None:
    assert start(folder, 0, "undisturbed") == 0
    expected = results(tree, folder / "undisturbed")
    assert len(expected) == 9
    at, kills = 1, 0
    while start(folder, at) == -signal.SIGKILL:
        assert start(folder, 0) == 0, at
        assert results(tree, folder / "out") == expected, at
        shutil.rmtree(folder / "out")
        kills, at = kills + 1, at + 1 + at // 6
    assert kills > 15


@pytest.mark.usefixtures("inline")
def test_killed_again_and_again_it_still_ends_with_the_same_bytes(folder: Path, tree: Tree) -> None:
    assert start(folder, 0, "undisturbed") == 0
    kills, at = 0, 1
    while start(folder, at) == -signal.SIGKILL:
        kills, at = kills + 1, at + 5
    assert kills >= 5
    assert results(tree, folder / "out") == results(tree, folder / "undisturbed")


@pytest.mark.slow
def test_the_command_killed_at_random_instants_ends_with_the_same_bytes(
    folder: Path, tree: Tree
) -> None:
    begun = time.monotonic()
    subprocess.run(command(folder, "undisturbed"), cwd=folder, check=True, capture_output=True)
    whole_s = time.monotonic() - begun
    kills = kill_until_done(command(folder, "out", "--workers", "2"), folder, whole_s, seed=0)
    assert kills >= 2
    assert results(tree, folder / "out") == results(tree, folder / "undisturbed")


@pytest.mark.usefixtures("inline")
def test_what_was_done_is_not_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(folder, 0, "undisturbed") == 0
    total = len(list_done(monkeypatch, folder, "counted"))
    assert start(folder, 30) == -signal.SIGKILL
    finished = {path.name for path in (folder / "out" / "work").iterdir() if path.suffix != ".tmp"}
    again = list_done(monkeypatch, folder, "out")
    assert finished and not finished & set(again)
    assert len(again) <= total - len(finished)


def list_done(monkeypatch: pytest.MonkeyPatch, folder: Path, out: str) -> list[str]:
    """Names of the chunks that a run of `out` in this process works on."""
    names: list[str] = []
    inner = work.Worker.run

    def counted(worker: work.Worker, task: work.Task) -> work.Done:
        names.append(task.chunk.name)
        return inner(worker, task)

    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(work.Worker, "run", counted)
        filter_corpus("in", Path("heads"), Path(out), FilterSettings(workers=2))
    return names


def test_ctrl_c_stops_with_a_hint_and_the_same_command_goes_on(folder: Path, tree: Tree) -> None:
    lines = (folder / "in" / "a.jsonl").read_bytes()
    (folder / "in" / "a.jsonl").write_bytes(lines * 12)
    process = subprocess.Popen(
        command(folder), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (folder / "out" / "kept" / "part-00001.jsonl.zst").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    # Before it, on a slow machine, lines of progress.
    assert printed.endswith("stopped; run the same command again to go on\ninterrupted\n")
    assert "Traceback" not in printed
    assert b'"state"' in (folder / "out" / "filter.json").read_bytes()
    for out in ("out", "undisturbed"):
        subprocess.run(command(folder, out), cwd=folder, check=True, capture_output=True)
    assert results(tree, folder / "out") == results(tree, folder / "undisturbed")


@pytest.mark.usefixtures("inline")
def test_sources_typed_in_another_way_resume_to_the_same_bytes(
    folder: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(folder, 0, "undisturbed") == 0
    assert start(folder, 30) == -signal.SIGKILL
    monkeypatch.chdir(folder)
    filter_corpus(
        str(folder / "in" / ".." / "in"), folder / "heads", folder / "out", FilterSettings()
    )
    assert results(tree, folder / "out") == results(tree, folder / "undisturbed")


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("place", ["chunk", "part", "summary"])
def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(
    folder: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    assert start(folder, 0, "undisturbed") == 0
    monkeypatch.chdir(folder)
    full = {"chunk": "work/", "part": "kept/", "summary": "filter.json.tmp"}[place]
    inner, left = Path.open, 1

    def limited(path: Path, *arguments, **named):
        nonlocal left
        if full in str(path) and "w" in "".join(map(str, arguments)):
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return inner(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", limited)
        with pytest.raises(DataError) as caught:
            filter_corpus("in", Path("heads"), Path("out"), FilterSettings())
    assert caught.value.code == "E-DISK-FULL" and "\n" not in str(caught.value)
    filter_corpus("in", Path("heads"), Path("out"), FilterSettings())
    assert results(tree, folder / "out") == results(tree, folder / "undisturbed")


def test_a_second_writer_is_kept_out(folder: Path) -> None:
    (folder / "out").mkdir()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from nmoe_data.files import only_writer; from pathlib import Path\n"
            "with only_writer(Path('out')): print('held', flush=True); input()",
        ],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    ended = subprocess.run(command(folder), cwd=folder, capture_output=True, text=True)
    holder.communicate(b"\n")
    assert ended.returncode == 2 and ended.stderr.startswith("error E-OUT-BUSY")


@pytest.mark.parametrize("damage", ["cut", "changed", "settings", "gone", "header"])
def test_a_chunk_file_that_is_not_whole_counts_as_not_there(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "chunk"
    table = work.SCORES_SCHEMA.empty_table()
    result = ChunkResult(5, 9, table, b"kept", [(1, b"line\n")], [work.Rejected(0, 3, "a", "b")])
    write_chunk(path, result, "these")
    assert read_chunk(path, "these") == result
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-3])
    elif damage == "changed":
        path.write_bytes(data.replace(b"line", b"lime"))
    elif damage == "gone":
        path.unlink()
    elif damage == "header":
        path.write_bytes(data[:20])
    assert read_chunk(path, "others" if damage == "settings" else "these") is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == (
        [] if damage == "gone" else ["chunk"]
    )
