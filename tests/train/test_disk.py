"""A disk that is full or forbidden: one clear error, nothing lost, and the run goes on later.

The small disk is a tmpfs in a mount namespace of a child process, so that nothing is left behind.
Where the system allows no such mount, the limit is that of the size of a file.
"""

import ctypes
import errno
import gc
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nmoe_data.errors import DataError
from nmoe_train.checkpoint import newest_sound_checkpoint
from nmoe_train.config import Config
from nmoe_train.loop import Outcome

Tiny = Callable[..., Config]
Run = Callable[..., Outcome]
CLONE_NEWNS, CLONE_NEWUSER, MS_PRIVATE_ALL, MS_REMOUNT_READ_ONLY = 0x20000, 0x10000000, 0x44000, 33
UNLIMITED = resource.RLIM_INFINITY


class SmallDisk:
    """A folder with little space, for a child process alone."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        folder.mkdir()
        self.mounted = any(self._mount(flags, size) for flags in (0, CLONE_NEWUSER))

    def _mount(self, flags: int, size: int) -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS | flags):
            return False
        if libc.mount(None, b"/", None, MS_PRIVATE_ALL, None):
            return False
        options = f"size={size}".encode()
        return libc.mount(b"tmpfs", bytes(self.folder), b"tmpfs", 0, options) == 0

    def fill(self, left: int) -> None:
        """Leaves about `left` bytes."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (left, UNLIMITED))
            return
        free = os.statvfs(self.folder)
        with (self.folder / "ballast").open("wb") as stream:
            stream.write(bytes(max(0, free.f_bavail * free.f_bsize - left)))

    def free(self) -> None:
        """Gives the space back."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
            return
        (self.folder / "ballast").unlink()

    def forbid(self) -> None:
        """Makes the folder read-only."""
        if not self.mounted:
            self.folder.chmod(0o500)
            if os.geteuid() == 0:
                os.setuid(65534)
            return
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mount(None, bytes(self.folder), None, MS_REMOUNT_READ_ONLY, None) == 0


def failure(run: Run, *arguments: Any) -> DataError:
    try:
        run(*arguments)
    except DataError as error:
        return error
    raise AssertionError("the run went through")


@pytest.mark.parametrize(
    ("every", "full_after", "left", "goes_on_from"),
    [
        # No room for the tensors of step 4; the metrics still fit.
        (2, 3, 40_000, 2),
        # No room at all after step 12: the next page of the metrics is the first that fails.
        (10, 12, 0, 10),
    ],
    ids=["checkpoint", "metrics"],
)
def test_a_full_disk_is_one_error_and_the_run_goes_on_once_there_is_space(
    tiny: Tiny,
    run: Run,
    fork: Callable[..., Any],
    tmp_path: Path,
    every: int,
    full_after: int,
    left: int,
    goes_on_from: int,
) -> None:
    settings = {"checkpoint.every": every, "train.steps": 20}
    whole = tiny(**settings, **{"run.dir": str(tmp_path / "whole")})
    run(whole)

    def scenario() -> None:
        disk = SmallDisk(tmp_path / "small", 8 << 20)
        config = tiny(**settings, **{"run.dir": str(tmp_path / "small" / "run")})

        def fill(record: dict[str, Any]) -> None:
            if record["step"] == full_after:
                disk.fill(left)

        error = failure(run, config, fill)
        gc.collect()
        assert error.code == "E-DISK-FULL", error
        assert str(config.run.dir) in str(error)
        assert "\n" not in str(error)
        checkpoint, problems = newest_sound_checkpoint(config.run.dir / "checkpoints")
        assert checkpoint is not None and checkpoint.step == goes_on_from
        assert problems == []
        # Still full: the same clear error, and nothing gets worse.
        assert failure(run, config).code == "E-DISK-FULL"
        disk.free()
        assert run(config).status == "completed"
        record = json.loads((config.run.dir / "run.json").read_text())
        assert record["attempts"][-1]["from_step"] == goes_on_from
        final = Path("checkpoints/step-00000020/rank-00000.safetensors")
        assert (config.run.dir / final).read_bytes() == (whole.run.dir / final).read_bytes()

    code, out, err = fork(scenario).wait()
    # Standard error also hears of exceptions that Python could not raise, as from a late flush.
    assert (code, out, err) == (0, "", "")


def test_a_full_device_under_one_file_of_metrics(
    tiny: Tiny, run: Run, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    live = tiny().run.dir / "metrics" / "1-0.jsonl"

    def put_on_a_full_device(record: dict[str, Any]) -> None:
        # /dev/full refuses every write, and needs no rights to use.
        if record["step"] == 3:
            full = os.open("/dev/full", os.O_WRONLY)
            for descriptor in Path("/proc/self/fd").iterdir():
                if descriptor.resolve() == live:
                    os.dup2(full, int(descriptor.name))
            os.close(full)

    error = failure(run, tiny(), put_on_a_full_device)
    assert error.code == "E-DISK-FULL"
    record = json.loads((tiny().run.dir / "run.json").read_text())
    assert record["status"] == "failed"
    assert run(tiny()).status == "completed"
    assert [row["step"] for row in rows(tiny().run.dir, 1)] == [1, 2, 3]
    assert [row["step"] for row in rows(tiny().run.dir, 2)] == [3, 4, 5, 6]


def refuse(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """From now on no file with this ending finds room."""
    import nmoe_train.telemetry.metrics as module

    real = module.atomic_write

    def write(path: Path, content: bytes) -> None:
        if path.name.endswith(suffix):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, content)

    monkeypatch.setattr(module, "atomic_write", write)


def test_a_disk_that_is_full_when_the_metrics_are_sealed_fails_the_run(
    tiny: Tiny,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    events: Callable[[Path], list[dict[str, Any]]],
    rows: Callable[..., list[dict[str, Any]]],
) -> None:
    with monkeypatch.context() as patch:
        refuse(patch, ".parquet")
        error = failure(run, tiny())
    assert error.code == "E-DISK-FULL"
    assert "1-0-000.parquet" in str(error)
    record = json.loads((tiny().run.dir / "run.json").read_text())
    assert (record["status"], record["step"]) == ("failed", 6)
    assert [(e["event"], e.get("status")) for e in events(tiny().run.dir)][-2:] == [
        ("fault", None),
        ("end", "failed"),
    ]
    assert len(rows(tiny().run.dir, 1)) == 6
    # All steps are saved, so what is left is to say so.
    again = run(tiny())
    assert (again.status, again.step) == ("completed", 6)
    assert again.results.keys() == {"loss/validation", "loss/unigram"}
    assert json.loads((tiny().run.dir / "run.json").read_text())["status"] == "completed"


def test_a_run_folder_under_a_file_is_refused(tiny: Tiny, run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        error = failure(run, tiny(**{"run.dir": str(path)}))
        assert error.code == "E-NOT-A-FOLDER"
        assert str(path) in str(error)
        assert "\n" not in str(error)
    assert (tmp_path / "file").read_text() == "text"


def test_a_read_only_disk_is_refused(
    tiny: Tiny, run: Run, fork: Callable[..., Any], tmp_path: Path
) -> None:
    def scenario() -> None:
        disk = SmallDisk(tmp_path / "small", 1 << 20)
        disk.forbid()
        error = failure(run, tiny(**{"run.dir": str(tmp_path / "small" / "run")}))
        assert error.code == ("E-READ-ONLY" if disk.mounted else "E-PERMISSION"), error

    assert fork(scenario).wait() == (0, "", "")
