"""The index: which folders are runs, what run.json may hold, and how both change under it."""

import json
import os
import shutil
from pathlib import Path

import pytest
from nviz.errors import VizError
from nviz.store import json_files
from nviz.store.files import list_metrics_files
from nviz.store.runs import Run, RunIndex, parse_run
from run_folder import RunFolder, record


def age(run: RunFolder, seconds: float) -> None:
    """Make the run's files look as old as that."""
    for path in run.path.rglob("*"):
        if path.is_file():
            stat = path.stat()
            os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))


def test_runs_are_found_at_the_root_and_below_groups(root: Path) -> None:
    for name in ("a", "group/b", "group/deeper/c"):
        RunFolder(root, name)
    RunFolder(root, "one/two/three/too-deep")
    assert set(RunIndex(root).refresh()) == {"a", "group/b", "group/deeper/c"}


def test_one_run_folder_is_a_root_of_one(root: Path) -> None:
    run = RunFolder(root, "alone")
    assert list(RunIndex(run.path).refresh()) == ["alone"]


def test_folders_inside_a_run_are_not_runs(root: Path) -> None:
    run = RunFolder(root, "a")
    RunFolder(run.path / "checkpoints", "copy")
    assert list(RunIndex(root).refresh()) == ["a"]


def test_a_link_out_of_the_root_is_not_followed(root: Path, tmp_path: Path) -> None:
    RunFolder(tmp_path / "elsewhere", "secret")
    (root / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    (root / "up").symlink_to(tmp_path / "elsewhere")
    assert RunIndex(root).refresh() == {}


def test_a_linked_run_json_is_not_read(root: Path, tmp_path: Path) -> None:
    secret = RunFolder(tmp_path, "secret", name="secret name").path / "run.json"
    (root / "a").mkdir()
    (root / "a" / "run.json").symlink_to(secret)
    (run,) = RunIndex(root).refresh().values()
    assert (run.key, run.name, run.status) == ("a", "a", "unreadable")
    assert run.problem is not None and "link" in run.problem


def test_a_linked_metrics_folder_is_not_read(root: Path, tmp_path: Path) -> None:
    run, other = RunFolder(root, "a"), RunFolder(tmp_path, "other")
    other.append({"step": 0})
    (run.path / "metrics").rmdir()
    (run.path / "metrics").symlink_to(other.path / "metrics")
    assert list_metrics_files(run.path) == []


def test_newest_run_comes_first(root: Path) -> None:
    for name, started in (("old", 1.0), ("new", 3.0), ("middle", 2.0)):
        RunFolder(root, name, started_unix_s=started, status="completed")
    assert list(RunIndex(root).refresh()) == ["new", "middle", "old"]


def test_a_missing_root_is_one_clear_error(root: Path) -> None:
    with pytest.raises(VizError, match=r"E-RUNS-MISSING.*nowhere"):
        RunIndex(root / "nowhere")


def test_a_root_that_vanishes_leaves_an_empty_list(root: Path) -> None:
    RunFolder(root, "a")
    index = RunIndex(root)
    assert index.refresh()
    shutil.rmtree(root)
    assert index.refresh() == {}


def test_a_running_run_that_is_silent_for_two_minutes_is_stalled(root: Path) -> None:
    run = RunFolder(root, "a")
    now = run.fields["updated_unix_s"]
    index = RunIndex(root)
    assert index.refresh(now + 119)["a"].status == "running"
    assert index.refresh(now + 121)["a"].status == "stalled"


def test_fresh_metrics_keep_a_run_with_an_old_run_json_running(root: Path) -> None:
    run = RunFolder(root, "a")
    now = run.fields["updated_unix_s"]
    run.append(record(0))
    written = (run.path / "metrics" / "1-0.jsonl").stat().st_mtime
    run.save(updated_unix_s=now - 1000)
    index = RunIndex(root)
    assert index.refresh(written + 60)["a"].status == "running"
    age(run, 1000)
    assert index.refresh(written + 60)["a"].status == "stalled"


def test_an_ended_run_is_never_stalled(root: Path) -> None:
    RunFolder(root, "a", status="completed", updated_unix_s=0.0)
    assert RunIndex(root).refresh()["a"].status == "completed"


def test_a_half_written_run_json_shows_as_unreadable_and_heals(root: Path) -> None:
    run = RunFolder(root, "a")
    whole = (run.path / "run.json").read_text()
    (run.path / "run.json").write_text(whole[: len(whole) // 2])
    index = RunIndex(root)
    broken = index.refresh()["a"]
    assert (broken.status, broken.name) == ("unreadable", "a")
    assert broken.problem and "no whole JSON" in broken.problem
    (run.path / "run.json").write_text(whole)
    assert index.refresh()["a"].status == "running"


def test_a_run_that_was_read_once_outlives_a_half_written_run_json(root: Path) -> None:
    run = RunFolder(root, "a", name="kept")
    index = RunIndex(root)
    assert index.refresh()["a"].name == "kept"
    (run.path / "run.json").write_text('{"schema_ver')
    assert index.refresh()["a"].name == "kept"


def test_a_changed_run_json_is_read_again_and_an_unchanged_one_is_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, index = RunFolder(root, "a"), RunIndex(root)
    RunFolder(root, "b")
    reads: list[Path] = []
    whole = json_files.read_plain
    monkeypatch.setattr(
        json_files, "read_plain", lambda path, most: (reads.append(path), whole(path, most))[1]
    )
    assert index.refresh()["a"].step == 0
    assert len(reads) == 2
    run.save(step=7)
    assert index.refresh()["a"].step == 7
    assert len(reads) == 3


def test_a_folder_made_anew_under_the_same_name_is_another_run(root: Path) -> None:
    RunFolder(root, "a", started_unix_s=1.0)
    index = RunIndex(root)
    first = index.refresh()["a"]
    shutil.rmtree(root / "a")
    assert index.refresh() == {}
    RunFolder(root, "a", started_unix_s=2.0)
    assert index.refresh()["a"].identity != first.identity


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"schema_version": 2}',
        b"{}",
        b"[" * 100_000,
        b'{"schema_version": 1, "status": "flying"}',
    ],
)
def test_what_is_no_run_json_of_this_version_is_unreadable(text: bytes) -> None:
    run = parse_run("k", Path("k"), text)
    assert run.status == "unreadable"
    assert run.problem


@pytest.mark.parametrize("odd", [None, 3, "text", [], {}, [None], {"a": [1]}, -1, 1e999, True])
def test_fields_of_the_wrong_type_never_break_a_run(odd: object) -> None:
    whole = RunFolder._defaults("x")
    for name in whole:
        if name in ("schema_version", "status"):
            continue
        run = parse_run("k", Path("k"), json.dumps(whole | {name: odd}).encode())
        assert isinstance(run, Run)
        assert isinstance(run.config, dict) and isinstance(run.name, str)
        assert run.step is None or run.step >= 0
        assert run.duration_s(1e9) is None or run.duration_s(1e9) >= 0
