"""The mirror holds a checkpoint whole or not at all, whatever network and storage do."""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_proxy import CUT, FAIL, HOLD, PASS, SPOIL, FaultyProxy, proxy
from nmoe_data.files import only_writer
from nmoe_train.checkpoint import complete_checkpoints, write_checkpoint
from nmoe_train.errors import TrainError
from nmoe_train.storage.folders import COMPLETE, verify
from nmoe_train.storage.mirror import Mirror, fetch_newest
from nmoe_train.storage.target import Limiter, Target
from nmoe_train.storage.uploader import FINISH, LOOK, Uploader
from nmoe_train.storage.uploads import Orders, Uploads
from s3_bucket import NAME, Bucket, bucket

__all__ = ["bucket", "proxy"]

META: dict[str, Any] = {"tokens": 128, "updates": 2, "fields": {}}
URL = f"s3://{NAME}/runs/my/checkpoints"
PATIENCE_S = 360.0
SHORT_S = 1.0
LONG_S = 120.0
BODY = "rank-00000.safetensors"


def save(root: Path, step: int, keep: int = 9, **options: Any) -> Path:
    """A checkpoint of 8.8 MB, more than one part."""
    tensors = {"model.a": torch.arange(2_200_000) % 255 + step, "model.b": torch.ones(3) * step}
    tensors["model.a"] = tensors["model.a"].float()
    return write_checkpoint(root, step, tensors, META, keep=keep, **options)


def mirror(url: str = URL, patience_s: float = PATIENCE_S) -> Mirror:
    return Mirror(Target(url, patience_s))


def ignore(sent: int) -> None:
    """Progress that nobody looks at."""


def allow() -> None:
    """A guard that lets everything pass."""


def assert_same(folder: Path, bucket: Bucket) -> None:
    """The bucket has the folder's files, and no others, byte for byte."""
    there = bucket.contents(f"runs/my/checkpoints/{folder.name}/")
    assert there == {path.name: path.read_bytes() for path in folder.iterdir()}


def is_part(method: str, path: str) -> bool:
    return method == "PUT" and BODY in path and "partNumber" in path


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


@dataclass
class Known:
    """What a run knows of its mirror."""

    newest: int = 0
    told: list[str] = field(default_factory=list)

    def tell(self, what: str) -> None:
        self.told.append(what)


def faulty_first(times: int, fate: str, concerns: Callable[[str, str], bool]) -> Any:
    """A rule: the first requests of a kind meet a fate, and the later ones pass."""
    left = [fate] * times

    def rule(method: str, path: str) -> str:
        return left.pop() if concerns(method, path) and left else PASS

    rule.left = left  # type: ignore[attr-defined]  # for who asks what is still to come
    return rule


@pytest.mark.parametrize("url", [URL, "file"])
def test_a_checkpoint_goes_there_and_back_byte_for_byte(
    tmp_path: Path, bucket: Bucket, url: str
) -> None:
    there = mirror(url if url == URL else f"file://{tmp_path}/far")
    folder = save(tmp_path / "here", 4)
    sent: list[int] = []
    there.upload(folder, sent.append)
    assert sum(sent) == (folder / BODY).stat().st_size
    assert there.complete() == ["step-00000004"] and there.holds(folder)
    assert fetch_newest(there, tmp_path / "back", print, allow) == (folder.name, [])
    back = tmp_path / "back" / folder.name
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {
        p.name: p.read_bytes() for p in folder.iterdir()
    }
    assert there.damages(folder.name) == []


@pytest.mark.parametrize(
    ("fate", "patience_s"),
    [(FAIL, PATIENCE_S), (CUT, PATIENCE_S), (SPOIL, PATIENCE_S), (HOLD, LONG_S)],
)
def test_a_fault_that_passes_is_overcome_and_complete_comes_last(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, fate: str, patience_s: float
) -> None:
    folder = save(tmp_path, 4)
    rule = faulty_first(5 if fate != HOLD else 1, fate, is_part)
    proxy.rule = rule
    mirror(patience_s=patience_s).upload(folder, ignore)
    assert rule.left == []
    assert_same(folder, bucket)
    puts = [path for method, path in proxy.seen if method == "PUT"]
    assert max(i for i, path in enumerate(puts) if BODY in path) < min(
        i for i, path in enumerate(puts) if COMPLETE in path
    )


@pytest.mark.parametrize("fate", [FAIL, CUT, SPOIL])
def test_a_fault_that_stays_never_leaves_a_complete_folder(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, fate: str
) -> None:
    folder = save(tmp_path, 4)
    proxy.rule = lambda method, path: fate if is_part(method, path) else PASS
    with pytest.raises(OSError):
        mirror(patience_s=SHORT_S).upload(folder, ignore)
    assert COMPLETE not in bucket.contents("runs/my/checkpoints/step-00000004/")
    proxy.rule = lambda method, path: PASS
    mirror().upload(folder, ignore)
    assert_same(folder, bucket)


def test_any_request_may_fail_or_be_cut(tmp_path: Path, bucket: Bucket, proxy: FaultyProxy) -> None:
    folder = write_checkpoint(tmp_path, 4, {"model.a": torch.ones(3)}, META, keep=2)
    there = mirror()
    there.upload(folder, ignore)
    requests = len(proxy.seen)
    for number in range(requests):
        bucket.delete()
        seen, fate = len(proxy.seen), (FAIL, CUT)[number % 2]
        proxy.rule = lambda *_, n=seen + number + 1, f=fate: f if len(proxy.seen) == n else PASS
        there.upload(folder, ignore)
        assert_same(folder, bucket)


def test_a_folder_that_stands_there_with_other_content_is_replaced(
    tmp_path: Path, bucket: Bucket
) -> None:
    there = mirror()
    first = save(tmp_path / "a", 4)
    there.upload(first, ignore)
    again = write_checkpoint(tmp_path / "b", 4, {"model.a": torch.ones(3)}, META, keep=2)
    assert not there.holds(again)
    there.upload(again, ignore)
    assert there.holds(again)
    assert_same(again, bucket)


def test_what_is_damaged_here_is_not_complete_there(tmp_path: Path, bucket: Bucket) -> None:
    folder = save(tmp_path, 4)
    body = bytearray((folder / BODY).read_bytes())
    body[-1] ^= 1
    (folder / BODY).write_bytes(body)
    with pytest.raises(TrainError, match="E-CHECKPOINT-CORRUPT"):
        mirror().upload(folder, ignore)
    assert bucket.contents("runs/") == {}


def test_a_file_that_is_there_is_not_sent_again(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy
) -> None:
    folder = save(tmp_path, 4)
    mirror().upload(folder, ignore)
    bucket.delete(f"runs/my/checkpoints/{folder.name}/{COMPLETE}")
    proxy.seen.clear()
    mirror().upload(folder, ignore)
    assert not [path for method, path in proxy.seen if is_part(method, path)]
    assert_same(folder, bucket)
    # One of the same size that is another is sent.
    bucket.delete(f"runs/my/checkpoints/{folder.name}/{COMPLETE}")
    size = (folder / BODY).stat().st_size
    bucket.put(f"runs/my/checkpoints/{folder.name}/{BODY}", b"x" * size)
    mirror().upload(folder, ignore)
    assert_same(folder, bucket)


def test_fetching_passes_over_what_is_damaged_there(tmp_path: Path, bucket: Bucket) -> None:
    there = mirror()
    for step in (2, 4):
        there.upload(save(tmp_path / "here", step), ignore)
    bucket.put(f"runs/my/checkpoints/step-00000004/{BODY}", b"x" * 100)
    name, problems = fetch_newest(there, tmp_path / "back", print, allow)
    assert name == "step-00000002"
    assert len(problems) == 1 and "step-00000004" in problems[0]
    assert [p.name for p in complete_checkpoints(tmp_path / "back")] == ["step-00000002"]
    assert there.damages("step-00000002") == []
    assert len(there.damages("step-00000004")) == 1
    bucket.delete(f"runs/my/checkpoints/step-00000002/{BODY}")
    with pytest.raises(TrainError, match=r"E-CHECKPOINT-CORRUPT.*none of the 2"):
        fetch_newest(there, tmp_path / "other", print, allow)


def test_a_fetch_overcomes_faults_and_an_absent_storage_is_no_empty_one(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy
) -> None:
    folder = save(tmp_path / "here", 4)
    mirror().upload(folder, ignore)
    proxy.rule = faulty_first(3, FAIL, lambda method, path: method == "GET" and BODY in path)
    assert fetch_newest(mirror(), tmp_path / "back", print, allow) == (folder.name, [])
    proxy.rule = lambda method, path: FAIL
    with pytest.raises(TrainError, match="E-MIRROR"):
        fetch_newest(mirror(patience_s=SHORT_S), tmp_path / "other", print, allow)
    bucket.admit_anybody_for("0")
    proxy.rule = lambda method, path: PASS
    try:
        with pytest.raises(TrainError, match="access denied"):
            fetch_newest(mirror(), tmp_path / "other", print, allow)
    finally:
        bucket.admit_anybody_for("inf")
    assert not (tmp_path / "other").exists()


def test_a_fetch_ends_where_the_run_has_gone_on_without_it(tmp_path: Path, bucket: Bucket) -> None:
    folder = save(tmp_path / "here", 4)
    mirror().upload(folder, ignore)
    root = tmp_path / "back"
    files = len(list(folder.iterdir()))

    def end_before(number: int) -> int:
        asked = 0

        def guard() -> None:
            nonlocal asked
            asked += 1
            if asked == number:
                raise TrainError("E-PEER", "counted out", "")

        with contextlib.suppress(TrainError):
            fetch_newest(mirror(), root, print, guard)
        return asked

    for number in range(1, files + 2):
        assert end_before(number) == number
        assert len(list(root.rglob("*"))) == number - 1, "a folder, and a file at a time"
        assert complete_checkpoints(root) == []
    assert end_before(files + 2) == files + 1
    assert [path.name for path in complete_checkpoints(root)] == [folder.name]


def test_a_fetch_writes_into_no_file_of_another(tmp_path: Path, bucket: Bucket) -> None:
    folder = save(tmp_path / "here", 4)
    mirror().upload(folder, ignore)
    root, asked = tmp_path / "back", []

    def others_go_on() -> None:
        asked.append(True)
        if len(asked) == 2:
            # This process stood still, before its first file, while another fetched.
            mirror().fetch(folder.name, root, allow)

    with pytest.raises(FileExistsError):
        fetch_newest(mirror(), root, print, others_go_on)
    assert [path.name for path in complete_checkpoints(root)] == [folder.name]
    verify(root / folder.name)


def test_what_is_fetched_is_verified_as_it_stands_here(tmp_path: Path, bucket: Bucket) -> None:
    for step in (2, 4):
        mirror().upload(save(tmp_path / "here", step), ignore)
    body, asked = tmp_path / "back" / "step-00000004" / BODY, []

    def spoil() -> None:
        asked.append(True)
        if len(asked) == 3:
            body.write_bytes(b"x")

    name, problems = fetch_newest(mirror(), tmp_path / "back", print, spoil)
    assert name == "step-00000002" and len(problems) == 1 and str(body) in problems[0]


@pytest.mark.parametrize("keep", [None, 1, 2])
def test_the_mirror_keeps_the_newest_and_nothing_unfinished(
    tmp_path: Path, bucket: Bucket, keep: int | None
) -> None:
    there = mirror()
    bucket.put(f"runs/my/checkpoints/step-00000001/{BODY}", b"half")
    bucket.put("runs/my/checkpoints/notes/mine.txt", b"mine")
    for step in (2, 3, 4):
        folder = write_checkpoint(tmp_path, step, {"model.a": torch.ones(3)}, META, keep=9)
        there.upload(folder, ignore)
        there.prune(step, keep)
    steps = [int(name[5:]) for name in there.folders()]
    assert steps == {None: [4, 3, 2, 1], 1: [4], 2: [4, 3]}[keep]
    assert bucket.contents("runs/my/checkpoints/notes/") == {"mine.txt": b"mine"}


def test_folders_here_stay_until_a_newer_one_is_there(tmp_path: Path) -> None:
    known = Known()

    def steps() -> list[int]:
        return [int(path.name[5:]) for path in complete_checkpoints(tmp_path)]

    for step in (1, 2, 3):
        save(tmp_path, step, keep=1, mirror=known)
    assert steps() == [3, 2, 1]
    known.newest = 2
    save(tmp_path, 4, keep=1, mirror=known)
    assert steps() == [4, 3, 2]
    known.newest = 4
    save(tmp_path, 5, keep=2, mirror=known)
    assert steps() == [5, 4]
    assert known.told == []


def test_on_a_full_disk_the_oldest_go_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Known()
    for step in (1, 2):
        save(tmp_path, step, keep=1, mirror=known)
    monkeypatch.setattr("nmoe_train.checkpoint.folder.ROOM", 1e15)
    save(tmp_path, 3, keep=1, mirror=known)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000003"]
    assert len(known.told) == 2 and "step-00000001" in known.told[0]


def test_a_limit_holds_for_all_threads_together() -> None:
    limiter = Limiter(1e6)
    began_s = time.monotonic()
    threads = [threading.Thread(target=limiter.spend, args=(100_000,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The first may go at once; a slow machine only takes longer.
    assert time.monotonic() - began_s >= 0.5


def test_an_upload_keeps_to_its_limit(tmp_path: Path, bucket: Bucket) -> None:
    folder = save(tmp_path, 4)
    began_s = time.monotonic()
    Mirror(Target(URL, PATIENCE_S, limit=8e6)).upload(folder, ignore)
    # Before the second part goes, the first one's 8.4 MB are paid for.
    assert time.monotonic() - began_s >= 1.0
    assert_same(folder, bucket)


class Following:
    """An uploader that follows a folder in a thread of this process, and what it says."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, keep: int | None = None
    ) -> None:
        self.words: queue.Queue[str] = queue.Queue()
        self.said: list[dict[str, Any]] = []
        monkeypatch.setattr(
            "nmoe_train.storage.uploader.say",
            lambda kind, **f: self.said.append({"kind": kind, **f}),
        )
        monkeypatch.setattr("nmoe_train.storage.uploader.FIRST_PAUSE_S", 0.1)
        # Errors are what its tests are about; a slow machine is none.
        monkeypatch.setattr("nmoe_train.storage.target.SHORTEST_REQUEST_S", LONG_S)
        uploader = Uploader(root, mirror(patience_s=SHORT_S), keep)
        self.thread = threading.Thread(target=uploader.follow, args=(self.words,), daemon=True)
        self.thread.start()

    def steps(self) -> list[int]:
        return [item["step"] for item in self.said if item["kind"] == "mirrored"]

    def alerts(self) -> list[str]:
        return [item["what"] for item in self.said if item["kind"] == "alert"]

    def finish(self) -> None:
        self.words.put(FINISH)
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()


def test_the_newest_is_next_where_saves_are_faster_than_the_storage(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    proxy.rule = lambda method, path: HOLD if is_part(method, path) else PASS
    following = Following(tmp_path, monkeypatch)
    assert proxy.held.wait(LONG_S)
    for step in (4, 6):
        save(tmp_path, step)
        following.words.put(LOOK)
    proxy.release()
    following.finish()
    assert following.steps() == [2, 6]
    assert mirror().complete() == ["step-00000006", "step-00000002"]


def test_an_outage_is_told_once_a_step_and_ends_by_itself(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    proxy.rule = lambda method, path: FAIL
    following = Following(tmp_path, monkeypatch)
    wait_until(lambda: len(following.alerts()) == 1)
    seen = len(proxy.seen)
    # It goes on trying, without another word.
    wait_until(lambda: len(proxy.seen) > seen + 5)
    assert len(following.alerts()) == 1 and "step 2" in following.alerts()[0]
    proxy.rule = lambda method, path: PASS
    wait_until(lambda: following.steps() == [2])
    following.finish()
    assert len(following.alerts()) == 1


def test_a_damaged_folder_is_told_and_the_one_before_it_is_mirrored(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000004" / BODY).write_bytes(b"x")
    following = Following(tmp_path, monkeypatch)
    following.finish()
    assert following.steps() == [2]
    assert len(following.alerts()) == 1 and "E-CHECKPOINT-CORRUPT" in following.alerts()[0]
    assert mirror().complete() == ["step-00000002"]


@pytest.fixture
def uploads(tmp_path: Path) -> Iterator[Uploads]:
    found = Uploads(Orders(tmp_path / "here", URL, PATIENCE_S, limit=2e9))
    yield found
    found.end()


def test_an_upload_that_was_killed_is_completed_by_the_next_one(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, uploads: Uploads
) -> None:
    folder = save(tmp_path / "here", 4)
    proxy.rule = lambda method, path: HOLD if "partNumber=2" in path else PASS
    uploads.look()
    assert proxy.held.wait(LONG_S)
    process = uploads._process
    assert process is not None
    process.kill()
    process.wait(LONG_S)
    assert COMPLETE not in bucket.contents("runs/my/checkpoints/step-00000004/")
    proxy.release()
    proxy.rule = lambda method, path: PASS
    wait_until(lambda: bool(uploads.news()))
    uploads.look()
    uploads.finish()
    wait_until(lambda: not uploads.alive)
    uploads.end()
    assert uploads.newest == 4
    assert_same(folder, bucket)


def test_an_uploader_that_is_not_alone_says_so_and_goes_on_once_it_is(
    tmp_path: Path, bucket: Bucket, uploads: Uploads
) -> None:
    folder = save(tmp_path / "here", 4)
    with only_writer(tmp_path / "here"):
        uploads.look()
        told: list[dict[str, Any]] = []
        wait_until(lambda: bool(told.extend(uploads.news()) or told))
        assert [item["kind"] for item in told] == ["alert"]
        assert "another uploader" in told[0]["what"]
        assert uploads.alive and bucket.contents("runs/") == {}
    uploads.finish()
    wait_until(lambda: not uploads.alive)
    uploads.end()
    assert uploads.newest == 4
    assert [item["kind"] for item in uploads.news()] == ["mirrored"]
    assert_same(folder, bucket)


def test_an_uploader_that_is_never_alone_leaves_and_says_what_is_not_there(
    tmp_path: Path, bucket: Bucket, uploads: Uploads
) -> None:
    save(tmp_path / "here", 4)
    with only_writer(tmp_path / "here"):
        uploads.look()
        uploads.finish()
        wait_until(lambda: not uploads.alive)
        uploads.end()
    told = [item["what"] for item in uploads.news()]
    assert len(told) == 2 and "the newest checkpoint is not in the mirror" in told[1]
    assert bucket.contents("runs/") == {}


def test_the_uploader_ends_with_the_process_that_started_it(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, fork: Callable[..., Any]
) -> None:
    save(tmp_path / "here", 4)
    proxy.rule = lambda method, path: HOLD
    note = tmp_path / "pid"

    def trainer() -> None:
        uploads = Uploads(Orders(tmp_path / "here", URL, PATIENCE_S))
        uploads.look()
        assert uploads._process is not None
        note.write_text(str(uploads._process.pid))
        time.sleep(LONG_S)

    child = fork(trainer)
    assert proxy.held.wait(LONG_S)
    wait_until(lambda: note.exists() and note.read_text() != "")
    pid = int(note.read_text())
    assert Path(f"/proc/{pid}").exists()
    os.kill(child.pid, 9)
    child.wait()
    wait_until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie, which nobody here may wait for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("url", ["memory://a/b", "plain/path", "nonsense://a/b"])
def test_a_place_that_cannot_be_a_mirror_is_refused(url: str) -> None:
    with pytest.raises(TrainError, match="E-MIRROR-URL"):
        Target(url, PATIENCE_S)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(TrainError, match=r"E-MIRROR-PACKAGE.*nmoe-train\[s3\]"):
        Target(URL, PATIENCE_S)
