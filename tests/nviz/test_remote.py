"""Runs in a bucket, over HTTP: read as those in a folder, and followed without ever losing what was
read.
"""

import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nviz
import pytest
from nviz.cli import main
from nviz.errors import VizError
from nviz.store import RunIndex, Workspace, remote
from nviz.store.checkpoints import list_checkpoints
from nviz.store.database import Database
from nviz.store.remote import Mirror
from nviz.store.remote_names import remote_file
from run_folder import START, RunFolder, record, trained
from s3_bucket import NAME, Bucket, bucket
from streamlit.testing.v1 import AppTest

APP = Path(nviz.__file__).parent / "app" / "main.py"
__all__ = ["bucket"]
URL = f"s3://{NAME}/runs"
ROWS = 'SELECT run, step, "loss/train" FROM metrics ORDER BY run, step'


@pytest.fixture
def mirror(bucket: Bucket, tmp_path: Path) -> Iterator[Mirror]:
    made = Mirror(URL, tmp_path / "cache")
    yield made
    made.end()


def checkpointed(run: RunFolder) -> None:
    """Give the run one checkpoint of a file of 3 MB."""
    folder = run.path / "checkpoints" / "step-00000100"
    folder.mkdir(parents=True)
    (folder / "rank-0.safetensors").write_bytes(os.urandom(3_000_000))
    meta = json.dumps({"files": {"rank-0.safetensors": {"bytes": 3_000_000}}}).encode()
    (folder / "meta.json").write_bytes(meta)
    (folder / "COMPLETE").write_text(hashlib.sha256(meta).hexdigest())


def answer(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    return Database(RunIndex(folder).refresh().values()).query(sql).rows


def files(folder: Path) -> dict[str, bytes]:
    """Content by path of every file."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def wait_until(true: Callable[[], bool]) -> None:
    """Polls for half a minute; what is waited for takes a second."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def run_nviz(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program's entry."""
    monkeypatch.setattr(sys, "argv", ["nviz", *arguments])
    remote.mirror_of.cache_clear()
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return (end.value.code, *capsys.readouterr())


def test_a_bucket_reads_as_the_folder_it_was_made_from(
    bucket: Bucket, mirror: Mirror, root: Path
) -> None:
    checkpointed(trained(root, "sweep/first", steps=120, status="completed"))
    trained(root, "second", steps=60, tags=["wide"])
    bucket.upload(root)
    bucket.put("runs-of-others/third/run.json", b"{}")
    mirror.refresh()

    for sql in (ROWS, "SELECT * FROM runs ORDER BY run", "SELECT * FROM events ORDER BY ALL"):
        assert answer(mirror.root, sql) == answer(root, sql)
    ours, theirs = (list_checkpoints(place / "sweep" / "first") for place in (mirror.root, root))
    assert ours[0].state == "complete"
    assert ours[0].files == theirs[0].files
    # Tensors are not copied: a hole of their size takes no room.
    held = mirror.root / "sweep/first/checkpoints/step-00000100/rank-0.safetensors"
    assert held.stat().st_size == 3_000_000
    assert held.read_bytes() == bytes(3_000_000)
    assert mirror.state.problem is None
    assert mirror.state.left_out == ()


def test_a_growing_run_is_followed_and_only_what_changed_is_copied(
    bucket: Bucket, mirror: Mirror, root: Path
) -> None:
    grows, rests = RunFolder(root, "grows"), trained(root, "rests", steps=20)
    grows.append(*(record(step) for step in range(10)))
    bucket.upload(root)
    mirror.refresh()
    untouched = mirror.root / "rests" / "metrics" / "1-0.jsonl"
    inode = untouched.stat().st_ino
    space = Workspace(mirror.root)
    assert space.columns.rows(space.runs()["grows"].folder, ["loss/train"]).problems == ()

    before = (grows.path / "run.json").read_text()
    (grows.path / "run.json").write_text(before.replace('"running"', '"stopped"'))
    grows.append(*(record(step) for step in range(10, 15)))
    bucket.upload(grows.path, "runs/grows")
    mirror.refresh()
    assert files(mirror.root) == files(root)
    assert len(answer(mirror.root, ROWS)) == 15 + 20
    assert untouched.stat().st_ino == inode
    assert rests.path.is_dir()


def test_a_second_process_copies_nothing_again(
    bucket: Bucket, mirror: Mirror, root: Path, tmp_path: Path
) -> None:
    bucket.upload(trained(root, "run", steps=20).path.parent)
    mirror.refresh()
    inodes = {path: path.stat().st_ino for path in mirror.root.rglob("*") if path.is_file()}
    again = Mirror(URL, tmp_path / "cache")
    again.refresh()
    assert {path: path.stat().st_ino for path in again.root.rglob("*") if path.is_file()} == inodes


def test_a_vanished_run_leaves_the_list_and_a_new_one_comes(
    bucket: Bucket, mirror: Mirror, root: Path
) -> None:
    trained(root, "stays", steps=20)
    trained(root, "goes", steps=20)
    bucket.upload(root)
    mirror.refresh()
    assert Workspace(mirror.root).runs().keys() == {"stays", "goes"}
    bucket.delete("runs/goes/")
    shutil.rmtree(root / "goes")
    bucket.upload(trained(root, "comes", steps=20).path, "runs/comes")
    mirror.refresh()
    assert Workspace(mirror.root).runs().keys() == {"stays", "comes"}
    assert not (mirror.root / "goes").exists()


@pytest.mark.parametrize("loss", ["emptied", "dropped"])
def test_what_was_read_outlives_a_bucket_that_is_emptied_or_gone(
    bucket: Bucket, mirror: Mirror, root: Path, loss: str
) -> None:
    bucket.upload(trained(root, "run", steps=20).path.parent)
    mirror.refresh()
    if loss == "dropped":
        bucket.drop()
    else:
        bucket.delete()
    with pytest.raises(VizError, match="E-REMOTE") as error:
        mirror.refresh()
    assert "\n" not in str(error.value)
    assert files(mirror.root) == files(root)


def test_wrong_credentials_are_one_line(
    bucket: Bucket,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket.upload(trained(root, "run", steps=20).path.parent)
    bucket.admit_anybody_for("0")
    try:
        code, out, err = run_nviz(monkeypatch, capsys, "serve", URL)
    finally:
        bucket.admit_anybody_for("inf")
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error E-REMOTE: {URL}: access denied .*credentials.*\n", err)
    assert "secret-of-a-test" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("query", f"s3://{NAME}/nowhere", "SELECT 1"), "E-REMOTE-EMPTY", "holds nothing"),
        (("query", "s3://no-such-bucket/runs", "SELECT 1"), "E-REMOTE", "not there"),
        (("query", "nonsense://place/runs", "SELECT 1"), "E-REMOTE-URL", "nonsense"),
        (("export", URL, "--html", "x.html"), "E-RUN-MISSING", "holds no run.json"),
        (("alert", URL, "--once", "--write-events"), "E-REMOTE-WRITE", "--write-events"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_line(
    bucket: Bucket,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: str,
    words: str,
) -> None:
    bucket.put("runs/run/run.json", b"{}")
    status, out, err = run_nviz(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error {code}: ")
    assert words in err
    assert err.count("\n") == 1


def test_without_s3fs_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # It remembers the storages that it imported.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    status, _, err = run_nviz(monkeypatch, capsys, "query", URL, "SELECT 1")
    assert status == 2
    assert re.fullmatch(r"error E-REMOTE-PACKAGE: .*pip install 'nviz\[s3\]'.*\n", err)


def test_query_export_and_alert_answer_for_a_url(
    bucket: Bucket,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(root, "fails", steps=20, status="failed")
    bucket.upload(root)
    sql = "SELECT run, step FROM runs"
    assert run_nviz(monkeypatch, capsys, "query", URL, sql, "--csv")[1] == "run,step\nfails,19\n"
    page = tmp_path / "run.html"
    assert run_nviz(monkeypatch, capsys, "export", f"{URL}/fails", "--html", str(page))[0] == 0
    assert "<h1>fails</h1>" in page.read_text()
    status, told, _ = run_nviz(monkeypatch, capsys, "alert", URL, "--once")
    assert status == 1
    assert "raised fails [failed]" in told


def test_a_server_that_goes_away_leaves_the_pages_with_a_notice(
    bucket: Bucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(root, "run", steps=20)
    bucket.upload(root)
    monkeypatch.setattr(remote, "EVERY_S", 0.05)
    remote.mirror_of.cache_clear()
    mirror = remote.mirror_of(URL)
    mirror.follow()
    try:
        wait_until(lambda: files(mirror.root) == files(root))
        bucket.upload(trained(root, "later", steps=20).path, "runs/later")
        wait_until(lambda: files(mirror.root) == files(root))
        monkeypatch.setenv("NVIZ_RUNS", str(mirror.root))
        monkeypatch.setenv("NVIZ_RUNS_URL", URL)
        app = AppTest.from_file(str(APP), default_timeout=60).run()
        assert not app.exception
        assert len(app.error) == 0

        bucket.stop()
        wait_until(lambda: mirror.state.problem is not None)
        app.run()
        assert not app.exception
        assert re.search(r"Stale since \d\d:\d\d:\d\d UTC", app.error[0].value)
        assert len(app.dataframe[0].value) == 2
    finally:
        mirror.end()
    assert files(mirror.root) == files(root)


@pytest.mark.parametrize(
    "path",
    [
        "../run.json",
        "run/../../run.json",
        "/etc/run.json",
        "run//run.json",
        "./run.json",
        ".hidden/run.json",
        "a\\..\\..\\run.json",
        "C:/run.json",
        "a\n/run.json",
        "a\0/run.json",
        "\ud800/run.json",
        "a" * 201 + "/run.json",
        "a/b/c/d/e/f/run.json",
        "run/metrics/1-0.exe",
        "run/data/train/shard-00000.npy",
        "run/notes.txt",
    ],
)
def test_a_name_that_is_no_run_file_or_leads_elsewhere_is_passed_over(path: str) -> None:
    info = {"type": "file", "size": 3, "ETag": "x"}
    assert remote_file(f"{NAME}/runs/{path}", f"{NAME}/runs", info) is None
    assert remote_file(f"{NAME}/runs/fine/run.json", f"{NAME}/runs", info) is not None


def test_an_object_of_the_same_size_and_second_is_another_by_its_tag() -> None:
    info = {"type": "file", "size": 3, "LastModified": START}
    files = [remote_file("b/run.json", "b", info | {"ETag": tag}) for tag in ("x", "x", "y")]
    first, same, other = (file.version for file in files if file)
    assert first == same
    assert first != other


def test_a_full_mirror_keeps_the_newest_files_and_names_the_others(
    bucket: Bucket, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("runs/run/run.json", b"{}")
    bucket.put("runs/run/metrics/1-0-000.parquet", bytes(700))
    bucket.put("runs/run/metrics/1-0-001.parquet", bytes(2000))
    bucket.put("runs/run/metrics/1-0-002.parquet", bytes(700))
    monkeypatch.setattr(remote, "MOST_BYTES", 1000)
    monkeypatch.setattr(remote, "MOST_FILE_BYTES", 1500)
    mirror.refresh()
    held = files(mirror.root)
    assert sum(len(content) for content in held.values()) <= 1000
    assert "run/run.json" in held
    assert len(mirror.state.left_out) == 2
    assert any("1-0-001.parquet: larger" in line for line in mirror.state.left_out)
