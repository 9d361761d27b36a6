"""Disks that are full or cannot be written: one clear line, and nothing already made is lost."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, os_errors, sync_path
from nmoe_data.prep import prep


def mount(folder: Path, options: str) -> bool:
    """Mount memory on a folder; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


def run_with_file_limit(arguments: list[str], limit: int, folder: Path) -> tuple[int, str]:
    """Run nmoe-data where no file may grow past `limit` bytes."""

    def restrict() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code = "import sys; sys.argv[0] = 'nmoe-data'; from nmoe_data.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        preexec_fn=restrict,
    )
    return done.returncode, done.stderr


ARGUMENTS = ["prep", "in", "--out", "out", "--tokenizer", "bytes", "--held-out", "0"]


def test_a_file_that_may_not_grow_is_one_line_and_the_run_goes_on_later(
    tmp_path: Path, make_texts, write_jsonl, tree
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(2000))
    code, printed = run_with_file_limit(ARGUMENTS, 100_000, tmp_path)
    assert code == 2
    (line,) = [line for line in printed.splitlines() if line.strip()]
    assert line.startswith("error E-DISK-FULL")
    assert "again" in line
    assert run_with_file_limit(ARGUMENTS, 10**9, tmp_path)[0] == 0
    resumed = tree(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    assert run_with_file_limit(ARGUMENTS, 10**9, tmp_path)[0] == 0
    assert tree(tmp_path / "out") == resumed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB, or an ordinary folder where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = mount(folder, "size=256k")
    yield folder
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    small_disk: Path, tmp_path: Path, make_texts, write_jsonl, tree
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(3000))
    arguments = {"tokenizer": "bytes", "shard_tokens": 20_000}
    expected = prep(source, tmp_path / "expected", **arguments)
    if not os.path.ismount(small_disk):
        # Without the right to mount, test_a_file_that_may_not_grow covers the same path.
        return
    with pytest.raises(DataError, match=r"E-DISK-FULL.*No space left"):
        prep(source, small_disk / "out", **arguments)
    grow = ["mount", "-o", "remount,size=64m", str(small_disk)]
    subprocess.run(grow, check=True, capture_output=True)
    assert prep(source, small_disk / "out", **arguments).train_tokens == expected.train_tokens
    assert tree(small_disk / "out") == tree(tmp_path / "expected")


def test_an_output_below_a_file_is_one_line(tmp_path: Path, run_cli) -> None:
    (tmp_path / "a.txt").write_text("text")
    done = run_cli(
        "prep", tmp_path / "a.txt", "--out", tmp_path / "a.txt" / "out", "--tokenizer", "bytes"
    )
    assert done.code == 2
    assert done.err.startswith("error E-NOT-A-FOLDER")
    assert done.err.count("\n") == 1
    assert run_cli(
        "prep", tmp_path / "a.txt", "--out", tmp_path / "a.txt", "--tokenizer", "bytes"
    ).err.startswith("error E-NOT-A-FOLDER")


def test_a_read_only_output_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    target = tmp_path / "locked"
    target.mkdir()
    mounted = mount(target, "ro")
    if not mounted:
        target.chmod(0o555)
    try:
        with pytest.raises(DataError, match=r"E-READ-ONLY|E-PERMISSION"):
            prep(tmp_path / "a.txt", target / "out", tokenizer="bytes")
    finally:
        if mounted:
            subprocess.run(["umount", str(target)], check=True)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            atomic_write(path, b"n" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "E-DISK-FULL"),
        (errno.EDQUOT, "E-DISK-FULL"),
        (errno.EFBIG, "E-DISK-FULL"),
        (errno.EROFS, "E-READ-ONLY"),
        (errno.EACCES, "E-PERMISSION"),
        (errno.EPERM, "E-PERMISSION"),
        (errno.ENOTDIR, "E-NOT-A-FOLDER"),
        (errno.EEXIST, "E-NOT-A-FOLDER"),
        (errno.ENOENT, "E-NOT-FOUND"),
        (errno.EIO, "E-IO"),
        (None, "E-IO"),
    ],
)
def test_each_error_of_the_system_has_its_code_and_names_the_file(
    number: int | None, code: str, tmp_path: Path
) -> None:
    def fail(*name: str) -> None:
        with os_errors("write the checkpoint in", tmp_path):
            raise OSError(number, "reason", *name) if number else OSError("reason")

    line = f"{code}: cannot write the checkpoint in {tmp_path}: reason; "
    with pytest.raises(DataError, match=re.escape(line)) as raised:
        fail()
    assert raised.value.code == code
    if number:
        with pytest.raises(DataError, match=re.escape(f"in {tmp_path / 'file'}: reason; ")):
            fail(str(tmp_path / "file"))


def test_files_and_folders_can_be_synced_and_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    sync_path(tmp_path)
    sync_path(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        sync_path(tmp_path / "b")
