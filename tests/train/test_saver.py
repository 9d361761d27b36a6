"""A save costs the training a copy of its state, and nothing that the storage does reaches it."""

import errno
import hashlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nmoe_train.checkpoint.direct as direct
import nmoe_train.checkpoint.folder as folders
import pytest
import torch
from file_faults import takes_direct
from nmoe_data.errors import DataError
from nmoe_data.files import sha256_file
from nmoe_train.checkpoint import Saved, Saver, complete_checkpoints, newest_sound_checkpoint
from nmoe_train.checkpoint.body import Body
from nmoe_train.checkpoint.snapshot import HostSnapshot
from nmoe_train.config import Config
from nmoe_train.loop import Outcome
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups, RankFailed
from nmoe_train.parallel.letters import CalledOff, Letters
from reshard import Ranks, ranks_of
from safetensors.torch import load_file, save_file
from torch import Tensor

META: dict[str, Any] = {"tokens": 128, "updates": 2, "fields": {}}
STALL_S = 10.0
LONG_S = 60.0
State = dict[str, Tensor]
Tiny = Callable[..., Config]
Run = Callable[..., Outcome]


def state(rows: int = 64, value: float = 1.0) -> State:
    return {"model.a": torch.full((rows, 256), value), "model.b": torch.arange(5.0) + value}


def newest(root: Path) -> tuple[int, dict[str, Tensor]]:
    checkpoint, problems = newest_sound_checkpoint(root)
    assert checkpoint is not None and problems == []
    return checkpoint.step, dict(checkpoint.tensors())


class Storage:
    """Where the bodies of checkpoints go: held up or refused as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.stall_s = 0.0
        self.refused: set[int] = set()
        self.reached = threading.Event()
        real = folders._save_tensors

        def save(file: Path, body: Body) -> None:
            self.reached.set()
            assert self.open.wait(60)
            time.sleep(self.stall_s)
            if int(file.parent.name[5:]) in self.refused:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
            real(file, body)

        monkeypatch.setattr(folders, "_save_tensors", save)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    found = Storage(monkeypatch)
    yield found
    found.open.set()


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def test_a_body_is_what_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{dtype}-{number}": (torch.randn(shape, generator=draw) * 9).to(dtype)
        for dtype in DTYPES
        for number, shape in enumerate([(3, 5), (7,), (), (2, 0)])
    }
    tensors["turned"] = torch.arange(12.0).view(3, 4).T
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "want")
    for chunk in (1 << 20, 64, 7):
        monkeypatch.setattr("nmoe_train.checkpoint.body.CHUNK_BYTES", chunk)
        body = Body(tensors)
        body.write(tmp_path / f"got-{chunk}")
        got = load_file(tmp_path / f"got-{chunk}")
        want = load_file(tmp_path / "want")
        assert got.keys() == want.keys()
        for name in want:
            assert got[name].dtype == want[name].dtype, name
            assert torch.equal(got[name], want[name]), name
        assert sha256_file(tmp_path / f"got-{chunk}") == body.sha256
    with pytest.raises(FileExistsError):
        Body(tensors).write(tmp_path / "want")


def test_a_disk_that_fills_up_within_a_chunk_is_told_by_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, body, file = os.write, Body({"model.a": torch.ones(3 << 20)}), tmp_path / "body"

    def write(descriptor: int, data: memoryview) -> int:
        if os.fstat(descriptor).st_size >= direct.BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: direct.BLOCK])

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space") as caught:
        patched.setattr(direct.os, "write", write)
        body.write(file)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(file))


@pytest.mark.parametrize("refuses", ["nothing", "the flag", "the transfer"])
@pytest.mark.parametrize("size", [0, 5, 4096, 3 * 8192, 3 * 8192 + 1, 100_000])
def test_a_file_past_the_page_cache_has_every_byte_and_is_read_back_from_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    size: int,
    refuses: str,
) -> None:
    chunk = 8192
    if refuses == "nothing" and not takes_direct(tmp_path):
        pytest.skip("the file system of this machine's temporary files takes no direct writes")
    monkeypatch.setattr(direct, "_refused", set())
    used: list[bool] = []
    refusals: list[str] = []
    real_write, real_control = os.write, direct.fcntl.fcntl

    def write(descriptor: int, data: Any) -> int:
        flag = bool(real_control(descriptor, direct.fcntl.F_GETFL) & direct.O_DIRECT)
        if flag and refuses == "the transfer":
            refusals.append(refuses)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        used.append(flag)
        return real_write(descriptor, data)

    def control(descriptor: int, command: int, *value: int) -> Any:
        if value and value[0] & direct.O_DIRECT and refuses == "the flag":
            refusals.append(refuses)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_control(descriptor, command, *value)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(direct.fcntl, "fcntl", control)
    content = os.urandom(size)
    for name in ("one", "two"):
        file = direct.DirectWriter(tmp_path / name, chunk, size)
        for start in range(0, size, chunk):
            file.write(memoryview(content)[start : start + chunk])
        file.sync()
        file.close()
        assert (tmp_path / name).read_bytes() == content
        assert direct.sha256_from_disk(tmp_path / name, chunk) == sha256_file(tmp_path / name)
    whole = size // chunk
    assert used[: len(used) // 2] == [refuses == "nothing"] * whole + [False] * (size % chunk > 0)
    told = [record for record in caplog.records if "O_DIRECT" in record.getMessage()]
    assert len(told) == (refuses != "nothing" and whole > 0), "once, where it is so"
    assert len(refusals) == len(told), "nor is it asked again"


class LateDigest:
    """A SHA-256 that takes a chunk only once as many transfers as it needs have been made.

    `ahead`: how many more than the chunk's number. What does not come in `LONG_S` is an error.
    """

    def __init__(self, transfers: list[int], ahead: int) -> None:
        self._digest, self._transfers, self._ahead = hashlib.sha256(), transfers, ahead
        self._chunks = 0

    def update(self, chunk: memoryview) -> None:
        self._chunks += 1
        until_s = time.monotonic() + LONG_S
        while len(self._transfers) < self._chunks + self._ahead:
            assert time.monotonic() < until_s, "the transfer waits for the digest"
            time.sleep(0.001)
        time.sleep(0.01)  # for one that runs too far ahead
        self._digest.update(chunk)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


@pytest.mark.parametrize("chunk", [8192, 8190], ids=["direct", "cached"])
def test_chunks_are_hashed_while_others_are_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("nmoe_train.checkpoint.body.CHUNK_BYTES", chunk)
    file, transfers = tmp_path / "file", list[int]()
    body = Body({"model.a": torch.randn(20_001)})

    def noted(real: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            transfers.append(real(*arguments))
            return transfers[-1]

        return call

    for name in ("write", "readv"):
        monkeypatch.setattr(direct.os, name, noted(getattr(os, name)))
    late = SimpleNamespace(sha256=lambda: LateDigest(transfers, 0))
    monkeypatch.setattr("nmoe_train.checkpoint.body.hashlib", late)
    body.write(file)
    assert body.sha256 == sha256_file(file)
    transfers.clear()
    # It is read on into the other half while this one is hashed.
    late = SimpleNamespace(sha256=lambda: LateDigest(transfers, 1))
    monkeypatch.setattr(direct, "hashlib", late)
    assert direct.sha256_from_disk(file, chunk) == body.sha256


def test_a_snapshot_is_the_tensors_however_they_lie_in_memory() -> None:
    stack = torch.randn(4, 3, 5)
    tensors = {f"expert.{n}": stack[n] for n in (3, 0, 1)}
    tensors |= {"turned": torch.randn(3, 4).T, "part": torch.randn(4, 6)[:, 1:3]}
    tensors |= {
        "half": torch.randn(3).bfloat16(),
        "one": torch.tensor(3.0),
        "byte": stack.new_ones(1),
    }
    snapshot = HostSnapshot(torch.device("cpu"))
    for _ in range(2):
        copies = snapshot.take(tensors)
        assert list(copies) == list(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(copies[name], tensor), name
            assert copies[name].dtype == tensor.dtype
        stack.mul_(2)
        assert not torch.equal(copies["expert.1"], stack[1])


def test_what_changes_right_after_the_call_does_not_reach_the_file(
    tmp_path: Path, storage: Storage
) -> None:
    storage.open.clear()
    saver, tensors = Saver(tmp_path, 2), state()
    saver.begin(3, tensors, META)
    for tensor in tensors.values():
        tensor.fill_(-1)
    assert complete_checkpoints(tmp_path) == []
    assert saver.poll() is None
    storage.open.set()
    saved = saver.settle()
    assert saved is not None and saved.step == 3
    step, found = newest(tmp_path)
    assert step == 3
    assert all(torch.equal(found[name], tensor) for name, tensor in state().items())


def test_a_save_is_told_once_and_stays_under_way_until_it_is_settled(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 2)
    saver.begin(3, state(), META)
    while (saved := saver.poll()) is None:
        time.sleep(0.01)
    assert saved.step == 3 and saved.commit_ms > 0
    assert saver.poll() is None
    with pytest.raises(AssertionError):
        saver.begin(4, state(), META)
    assert saver.settle() is None
    saver.begin(4, state(), META)
    settled = saver.settle()
    assert settled is not None and settled.step == 4


def test_host_memory_is_flat_over_fifty_saves(tmp_path: Path, fork: Callable[..., Any]) -> None:
    size = 24 << 20

    def saves() -> None:
        tensors, saver = {"model.a": torch.ones(size // 4)}, Saver(tmp_path, 1)
        peaks = []
        for step in range(1, 51):
            saver.begin(step, tensors, META)
            saver.settle()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
        assert peaks[-1] - peaks[4] < size / 4, (peaks[4], peaks[-1])
        assert newest(tmp_path)[0] == 50

    assert fork(saves).wait() == (0, "", "")


def test_a_storage_that_stalls_holds_up_no_step(
    tiny: Tiny, run: Run, storage: Storage, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    storage.stall_s = STALL_S
    storage.open.clear()
    config = tiny(**{"checkpoint.every": 3, "train.steps": 5})

    def last(record: dict[str, Any]) -> None:
        if record["step"] == 5:
            # The save of step 3 has not begun to write: no step has waited for it.
            assert storage.reached.wait(60)
            began_s.append(time.monotonic())
            storage.open.set()

    began_s: list[float] = []
    outcome = run(config, last)
    assert outcome.status == "completed"
    assert time.monotonic() - began_s[0] > 2 * STALL_S, "the end of the run waits"
    assert "checkpoint/stall_ms" in rows(config.run.dir)[3]
    assert [path.name for path in complete_checkpoints(config.run.dir / "checkpoints")] == [
        "step-00000005",
        "step-00000003",
    ]


def test_the_next_save_waits_for_the_one_before_and_says_so(
    tiny: Tiny,
    run: Run,
    storage: Storage,
    rows: Callable[..., list[dict[str, Any]]],
    events: Callable[[Path], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage.open.clear()
    config = tiny(**{"checkpoint.every": 2, "train.steps": 5})
    real, waits = Saver.settle, threading.Event()

    def settle(saver: Saver) -> Saved | None:
        if saver._under_way is not None:
            waits.set()
        return real(saver)

    def let_go() -> None:
        assert waits.wait(60)
        time.sleep(0.6)
        storage.open.set()

    monkeypatch.setattr(Saver, "settle", settle)
    threading.Thread(target=let_go, daemon=True).start()
    run(config)
    stalls = [record.get("checkpoint/stall_ms") for record in rows(config.run.dir)]
    assert stalls[4] >= 600
    saved = [e for e in events(config.run.dir) if e["event"] == "checkpoint"]
    assert [event["step"] for event in saved] == [2, 4, 5]
    assert saved[0]["commit_ms"] >= 600


@pytest.mark.parametrize("refused", [2, 6])
def test_a_save_that_fails_ends_the_run_with_one_error_and_leaves_nothing_of_it(
    tiny: Tiny,
    run: Run,
    storage: Storage,
    events: Callable[[Path], list[dict[str, Any]]],
    refused: int,
) -> None:
    storage.refused = {refused}
    with pytest.raises(DataError) as caught:
        run(tiny(), lambda record: record["step"] > 2 and storage.reached.wait(60))
    assert caught.value.code == "E-DISK-FULL"
    assert f"step-0000000{refused}" in str(caught.value)
    found = [(event["event"], event.get("status")) for event in events(tiny().run.dir)]
    assert found[-2:] == [("fault", None), ("end", "failed")]
    left = [path.name for path in (tiny().run.dir / "checkpoints").iterdir()]
    assert len(left) == refused // 2 - 1 or refused == 6
    assert f"step-0000000{refused}" not in left
    storage.refused = set()
    assert run(tiny()).status == "completed"


def test_a_run_that_fails_waits_for_its_save(
    tiny: Tiny,
    run: Run,
    storage: Storage,
    events: Callable[[Path], list[dict[str, Any]]],
) -> None:
    storage.open.clear()

    def crash(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            threading.Timer(0.5, storage.open.set).start()
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError):
        run(tiny(), crash)
    found = [(event["event"], event["step"]) for event in events(tiny().run.dir)]
    assert found == [("start", 0), ("checkpoint", 2), ("fault", 3), ("end", 3)]
    assert newest(tiny().run.dir / "checkpoints")[0] == 2


def test_a_failed_save_is_told_even_where_the_run_fails_by_something_else(
    tiny: Tiny,
    run: Run,
    storage: Storage,
    events: Callable[[Path], list[dict[str, Any]]],
) -> None:
    storage.refused = {2}
    storage.open.clear()

    def crash(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            threading.Timer(0.5, storage.open.set).start()
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        run(tiny(), crash)
    faults = [event["what"] for event in events(tiny().run.dir) if event["event"] == "fault"]
    assert len(faults) == 2
    assert "not saved" in faults[0] and "No space" in faults[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_save_and_a_second_one_does_not(
    tiny: Tiny, run: Run, storage: Storage, fork: Callable[..., Any], number: signal.Signals
) -> None:
    storage.stall_s = 1.0

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            os.kill(os.getpid(), number)

    outcome = run(tiny(), stop)
    assert (outcome.status, outcome.step, outcome.stopped_by) == ("interrupted", 3, number)
    assert newest(tiny().run.dir / "checkpoints")[0] == 3

    def in_a_hurry() -> None:
        storage.open.clear()

        def twice(record: dict[str, Any]) -> None:
            os.kill(os.getpid(), number)
            threading.Timer(2.0, lambda: os.kill(os.getpid(), number)).start()

        with pytest.raises(KeyboardInterrupt):
            run(tiny(), twice)
        assert not storage.open.is_set()

    assert fork(in_a_hurry).wait()[0] == 0
    assert newest(tiny().run.dir / "checkpoints")[0] == 3


def ranks_that_save(number: int) -> Ranks:
    return Ranks(ranks_of(Layout(dp=number, ep=number)))


def savers(root: Path, ranks: Ranks, keep: int = 2) -> list[Saver]:
    return [Saver(root, keep, groups=groups) for groups in ranks.groups]


def begin(all_savers: list[Saver], step: int) -> None:
    for rank, saver in enumerate(all_savers):
        saver.begin(step, {f"model.{rank}": torch.full((4,), float(step + rank))}, META)


def settle(all_savers: list[Saver]) -> list[Exception | None]:
    found: list[Exception | None] = []
    for saver in all_savers:
        try:
            while not saver.poll() and not saver.failed:
                time.sleep(0.01)
            saver.settle()
            found.append(None)
        except Exception as error:
            found.append(error)
    return found


def test_ranks_complete_a_folder_by_letters_and_leave_none_behind(tmp_path: Path) -> None:
    ranks = ranks_that_save(3)
    three = savers(tmp_path, ranks)
    kept = []
    for step in range(1, 6):
        begin(three, step)
        assert settle(three) == [None] * 3
        found = newest(tmp_path)
        assert found[0] == step
        assert {n: float(t[0]) for n, t in found[1].items()} == {
            f"model.{rank}": float(step + rank) for rank in range(3)
        }
        store = ranks.groups[0].store
        assert store is not None
        kept.append(store.num_keys())
    assert kept[1:] == [kept[1]] * 4, "of the last two saves at most"


def test_a_rank_that_fails_is_told_to_all_and_the_next_save_is_whole(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folders._save_tensors

    def fails(file: Path, body: Body) -> None:
        if file.name == "rank-00001.safetensors" and "step-00000002" in str(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        real(file, body)

    monkeypatch.setattr(folders, "_save_tensors", fails)
    three = savers(tmp_path, ranks_that_save(3))
    begin(three, 1)
    assert settle(three) == [None] * 3
    begin(three, 2)
    first, second, third = settle(three)
    assert isinstance(second, OSError) and not isinstance(second, RankFailed)
    for other in (first, third):
        assert isinstance(other, RankFailed) and "rank 1 failed" in str(other)
    # What a rank still wrote may stand there; nobody sees it.
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001"]
    begin(three, 3)
    assert settle(three) == [None] * 3
    assert newest(tmp_path)[0] == 3


def test_without_a_rank_nothing_is_completed_and_leaving_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_train.checkpoint.saver.PATIENCE_S", 0.3)
    two = savers(tmp_path, ranks_that_save(2))
    two[0].begin(1, {"model.0": torch.ones(3)}, META)
    assert two[0].leave(wait=True) is None
    time.sleep(0.1)
    two[1].begin(1, {"model.1": torch.ones(3)}, META)
    time.sleep(0.3)
    assert complete_checkpoints(tmp_path) == []
    two[1].leave(wait=False)


def test_what_was_called_off_completes_nothing(tmp_path: Path, storage: Storage) -> None:
    storage.open.clear()
    saver = Saver(tmp_path, 2)
    saver.begin(1, state(), META)
    assert storage.reached.wait(60)
    assert saver.leave(wait=False) is None
    # Another generation writes the same step, and the old thread wakes up after it.
    storage.open.set()
    deadline = time.monotonic() + 60
    while any(thread.name == "save-1" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert complete_checkpoints(tmp_path) == []
    letters = Letters(Groups(Layout()), "topic")
    letters.call_off()
    with pytest.raises(CalledOff):
        letters.first_does(lambda: None)
