"""Real worker processes: the same bytes for any number of them, and a clear end if one dies."""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nmoe_data.hydra.filter.parts as parts
import nmoe_data.hydra.filter.plan as plan
import pytest
import zstandard
from hydra_heads import make_heads
from nmoe_data.errors import DataError
from nmoe_data.hydra.filter import FilterProgress, FilterSettings, filter_corpus
from nmoe_data.hydra.filter.executors import Failure

Tree = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def folder(tmp_path: Path, make_texts, write_jsonl) -> Path:
    """Plain and compressed JSONL, and heads for them."""
    texts = make_texts(400)
    write_jsonl(tmp_path / "in" / "a.jsonl", texts[:200])
    write_jsonl(tmp_path / "b.jsonl", texts[200:])
    data = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "in" / "b.jsonl.zst").write_bytes(zstandard.compress(data))
    make_heads(tmp_path / "heads", texts)
    return tmp_path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(parts, "PART_DOCUMENTS", 150)


def run(
    folder: Path,
    out: str,
    progress: Callable[[FilterProgress], None] | None = None,
    **named: Any,
) -> None:
    settings = FilterSettings(**named)
    filter_corpus(str(folder / "in"), folder / "heads", folder / out, settings, progress=progress)


def results(tree: Tree, out: Path) -> dict[str, bytes]:
    found = tree(out)
    del found["timing.json"]
    return found


def children() -> set[int]:
    """Processes begun by this one."""
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for path in listed for pid in path.read_text().split()}


def test_any_number_of_workers_gives_the_same_bytes(folder: Path, tree: Tree) -> None:
    for workers in (1, 2, 3):
        run(folder, f"out{workers}", workers=workers, dropped_sample=15)
    expected = results(tree, folder / "out1")
    assert len(expected) == 9
    assert results(tree, folder / "out2") == results(tree, folder / "out3") == expected


def test_workers_end_with_the_run(folder: Path) -> None:
    before = children()
    run(folder, "out", workers=2)
    # What stays is the tracker that multiprocessing keeps for the whole process.
    assert len(children() - before) <= 1


def test_a_killed_worker_is_one_clear_error_and_the_run_goes_on(folder: Path, tree: Tree) -> None:
    run(folder, "undisturbed")
    before = children()

    def kill_one(now: FilterProgress) -> None:
        if now.documents:
            for pid in sorted(children() - before):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"spawn_main" in command:
                    os.kill(pid, signal.SIGKILL)
                    return

    with pytest.raises(DataError, match=r"E-HYDRA-WORKER: .*killed by signal 9") as caught:
        run(folder, "out", workers=2, progress=kill_one)
    assert "\n" not in str(caught.value)
    run(folder, "out", workers=2)
    assert results(tree, folder / "out") == results(tree, folder / "undisturbed")


def test_workers_of_a_killed_coordinator_end_by_themselves(folder: Path) -> None:
    read, write = os.pipe()
    coordinator = os.fork()
    if coordinator == 0:
        # The pipe stays open as long as anyone begun here lives.
        os.set_inheritable(write, True)
        try:
            run(folder, "out", workers=2, progress=lambda now: time.sleep(0.05))
        finally:
            os._exit(1)
    os.close(write)
    deadline = time.monotonic() + 60
    while not list((folder / "out").glob("work/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(coordinator, signal.SIGKILL)
    os.waitpid(coordinator, 0)
    ended: list[bytes] = []
    waiting = threading.Thread(target=lambda: ended.append(os.read(read, 1)))
    waiting.start()
    waiting.join(30)
    assert ended == [b""]
    os.close(read)


def test_what_a_worker_raises_arrives_as_it_was() -> None:
    error = DataError("E-DISK-FULL", "cannot write a; b: no space", "free some")
    passed = pickle.loads(pickle.dumps(Failure(error))).error()
    assert isinstance(passed, DataError)
    assert (passed.code, str(passed)) == ("E-DISK-FULL", str(error))
    try:
        raise KeyError("surprise")
    except KeyError as unexpected:
        other = pickle.loads(pickle.dumps(Failure(unexpected))).error()
    assert isinstance(other, RuntimeError) and "KeyError: 'surprise'" in str(other)


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_bytes(folder: Path, tree: Tree) -> None:
    run(folder, "processes", workers=2)
    run(folder, "ray", workers=2, ray="local")
    assert not sys.modules["ray"].is_initialized()
    assert results(tree, folder / "ray") == results(tree, folder / "processes")
