"""A run whose checkpoints are mirrored: storage costs it nothing, and can bring it back."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_proxy import HOLD, PASS, FaultyProxy, proxy
from nmoe_train.checkpoint import complete_checkpoints, write_checkpoint
from nmoe_train.config import Config
from nmoe_train.errors import TrainError
from nmoe_train.interrupt import Interrupt
from nmoe_train.loop import Outcome
from nmoe_train.parallel.groups import ALONE
from nmoe_train.saves import LEFT_EARLY, Saves
from nmoe_train.storage.mirror import Mirror
from nmoe_train.storage.target import Target
from nmoe_train.storage.uploads import Uploads
from nmoe_train.telemetry import RunFolder, next_record
from s3_bucket import NAME, Bucket, bucket
from torch import Tensor

__all__ = ["bucket", "proxy"]

URL = f"s3://{NAME}/runs"
MIRROR = {"checkpoint.mirror": URL, "checkpoint.mirror_patience_s": 360, "checkpoint.keep": 1}
LONG_S = 120.0
Tiny = Callable[..., Config]
Run = Callable[..., Outcome]
Events = Callable[[Path], list[dict[str, Any]]]
Saved = Callable[[Path, int], dict[str, Tensor]]


def steps_here(config: Config) -> list[int]:
    return [int(p.name[5:]) for p in complete_checkpoints(config.run.dir / "checkpoints")]


def steps_there() -> list[int]:
    mirror = Mirror(Target(f"{URL}/run/checkpoints", 3 * LONG_S))
    return [int(name[5:]) for name in mirror.complete()]


def at_step(step: int, action: Callable[[], object]) -> Callable[[dict[str, Any]], None]:
    return lambda record: action() and None if record["step"] == step else None


def named(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in found if event["event"] == name]


def alerts(found: list[dict[str, Any]]) -> list[str]:
    return [event["what"] for event in named(found, "alert")]


@pytest.fixture
def uploaders(monkeypatch: pytest.MonkeyPatch) -> list[Uploads]:
    """The uploads of the runs of this test, once they have been told to look."""
    found: list[Uploads] = []
    look = Uploads.look

    def noted(uploads: Uploads) -> None:
        look(uploads)
        found.append(uploads)

    monkeypatch.setattr(Uploads, "look", noted)
    return found


def test_the_mirror_alone_brings_a_run_back_bitwise(
    tiny: Tiny, run: Run, events: Events, saved: Saved, bucket: Bucket, tmp_path: Path
) -> None:
    whole = tiny(**{"run.dir": str(tmp_path / "whole")})
    run(whole)
    config = tiny(**MIRROR)
    # It is stopped as by a signal, and its host is lost with all that is on it.
    outcome = run(config, at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert (outcome.status, outcome.step) == ("interrupted", 3)
    assert steps_there()[0] == 3 and named(events(config.run.dir), "mirror")[-1]["step"] == 3
    shutil.rmtree(config.run.dir)
    assert run(config).status == "completed"
    found = events(config.run.dir)
    assert (found[0]["event"], found[0]["step"]) == ("start", 3)
    assert named(found, "mirror")[-1]["step"] == 6 and alerts(found) == []
    want, got = saved(whole.run.dir, 6), saved(config.run.dir, 6)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert steps_here(config) == [6], "what is older went, once the newest was there"


def test_a_damaged_file_in_the_mirror_costs_a_few_steps_and_is_noted(
    tiny: Tiny, run: Run, events: Events, bucket: Bucket
) -> None:
    config = tiny(**MIRROR)
    run(config, at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    run(config)
    assert steps_there()[0] == 6 and 3 in steps_there()
    shutil.rmtree(config.run.dir)
    bucket.put("runs/run/checkpoints/step-00000006/rank-00000.safetensors", b"damaged")
    for step in set(steps_there()) - {3, 6}:
        bucket.delete(f"runs/run/checkpoints/step-{step:08d}/")
    run(config)
    found = events(config.run.dir)
    assert (found[0]["event"], found[0]["step"]) == ("start", 3)
    faults = named(found, "fault")
    assert len(faults) == 1 and "step-00000006" in faults[0]["what"]
    there = Mirror(Target(f"{URL}/run/checkpoints", 3 * LONG_S))
    assert there.damages("step-00000006") == [], "made again, and mirrored again"


@pytest.mark.parametrize("loss", ["credentials", "bucket"])
def test_training_goes_on_without_the_mirror_and_nothing_here_is_deleted(
    tiny: Tiny, run: Run, events: Events, bucket: Bucket, loss: str
) -> None:
    config = tiny(**MIRROR)
    lose = bucket.drop if loss == "bucket" else lambda: bucket.admit_anybody_for("0")
    try:
        outcome = run(config, at_step(1, lose))
    finally:
        if loss == "credentials":
            bucket.admit_anybody_for("inf")
    assert (outcome.status, outcome.step) == ("completed", 6)
    found = events(config.run.dir)
    told = alerts(found)
    assert told and all("is not in the mirror" in what and "\n" not in what for what in told)
    assert {"bucket": "not there", "credentials": "access denied"}[loss] in told[-1]
    assert "step 6" in told[-1]
    assert (found[-1]["event"], found[-1]["status"]) == ("end", "completed")
    assert steps_here(config) == [6, 4, 2], "more than are kept, as none is mirrored"
    if loss == "bucket":
        bucket.create()
    assert steps_there() == []
    # The next start, though it has nothing to train, completes the mirror and clears up.
    assert run(config).status == "completed"
    assert steps_there() == [6] and steps_here(config) == [6]


def test_a_start_with_nothing_here_does_not_begin_anew_where_it_may_not_look(
    tiny: Tiny, run: Run, bucket: Bucket
) -> None:
    bucket.admit_anybody_for("0")
    try:
        with pytest.raises(TrainError, match=r"E-MIRROR.*access denied"):
            run(tiny(**MIRROR))
    finally:
        bucket.admit_anybody_for("inf")


def test_a_storage_that_is_silent_holds_up_no_step_and_a_signal_leaves_it(
    tiny: Tiny,
    run: Run,
    events: Events,
    bucket: Bucket,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny(**MIRROR)
    proxy.rule = lambda method, path: HOLD if method == "POST" else PASS
    waiting, finish = threading.Event(), Uploads.finish

    def noted(uploads: Uploads) -> None:
        finish(uploads)
        waiting.set()

    monkeypatch.setattr(Uploads, "finish", noted)

    def stop() -> None:
        # All steps are made by now, and saved; only the mirror is awaited.
        assert waiting.wait(LONG_S) and proxy.held.wait(LONG_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(config)
    found = events(config.run.dir)
    assert [event["step"] for event in named(found, "checkpoint")] == [2, 4, 6]
    assert alerts(found) == [LEFT_EARLY]
    assert (found[-1]["event"], found[-1]["status"]) == ("end", "completed")
    assert steps_here(config) == [6, 4, 2]
    proxy.rule = lambda method, path: PASS
    proxy.release()
    assert run(config).status == "completed"
    assert steps_there() == [6]


def test_a_signal_that_comes_as_the_last_wait_begins_is_told_too(
    tiny: Tiny,
    run: Run,
    events: Events,
    uploaders: list[Uploads],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Uploads, "finish", lambda uploads: os.kill(os.getpid(), signal.SIGINT))
    config = tiny(**{"checkpoint.mirror": f"file://{tmp_path}/far", "train.steps": 1})
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert alerts(events(config.run.dir)) == [LEFT_EARLY]
    assert uploaders and not any(uploads.alive for uploads in uploaders)


def test_a_signal_that_is_only_noted_ends_the_last_wait(
    tiny: Tiny, events: Events, bucket: Bucket, proxy: FaultyProxy
) -> None:
    config = tiny(**MIRROR)
    folder = RunFolder(config.run.dir, next_record(config.run.dir))
    tensors = {"model.a": torch.ones(3)}
    meta: dict[str, Any] = {"tokens": 128, "updates": 2, "fields": {}}
    write_checkpoint(folder.checkpoints, 6, tensors, meta, keep=1)
    saves = Saves(config, ALONE, folder, torch.device("cpu"), {}, lambda text: None, may_fail=True)
    proxy.rule = lambda method, path: HOLD

    def stop() -> None:
        assert proxy.held.wait(LONG_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    # As in an elastic run, whose workers note signals as long as they live.
    with Interrupt() as interrupt, interrupt.noted(lambda text: None):
        saves.finish_mirror(6, interrupt)
    assert alerts(events(config.run.dir)) == [LEFT_EARLY]


def test_one_limit_holds_for_saves_and_for_the_mirror(
    tiny: Tiny, run: Run, events: Events, uploaders: list[Uploads], tmp_path: Path
) -> None:
    settings = {"checkpoint.limit_mb_s": 0.5, "checkpoint.mirror": f"file://{tmp_path}/far"}
    config = tiny(**settings, **{"train.steps": 3})
    run(config)
    assert {uploads._orders.limit for uploads in uploaders} == {5e5}
    (newest, *_) = complete_checkpoints(config.run.dir / "checkpoints")
    size = (newest / "rank-00000.safetensors").stat().st_size
    saves = named(events(config.run.dir), "checkpoint")
    assert [event["step"] for event in saves] == [2, 3]
    assert all(event["commit_ms"] >= size / 5e5 * 1e3 for event in saves)


def test_an_uploader_that_dies_is_told_and_started_again(
    tiny: Tiny, run: Run, events: Events, bucket: Bucket, uploaders: list[Uploads]
) -> None:
    def kill() -> None:
        process = uploaders[0]._process
        assert process is not None
        process.kill()
        process.wait()

    config = tiny(**MIRROR)
    assert run(config, at_step(1, kill)).status == "completed"
    (told,) = alerts(events(config.run.dir))
    assert "the uploader has ended (exit code -9)" in told
    assert steps_there()[0] == 6


def test_an_uploader_that_dies_in_the_last_wait_is_told(
    tiny: Tiny,
    run: Run,
    events: Events,
    bucket: Bucket,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy.rule = lambda method, path: HOLD if method == "POST" else PASS
    finish = Uploads.finish

    def killed(uploads: Uploads) -> None:
        finish(uploads)
        assert uploads._process is not None
        assert proxy.held.wait(LONG_S)
        uploads._process.kill()

    monkeypatch.setattr(Uploads, "finish", killed)
    config = tiny(**MIRROR)
    assert run(config).status == "completed"
    (told,) = alerts(events(config.run.dir))
    assert "the uploader has ended (exit code -9)" in told
    assert steps_here(config) == [6, 4, 2] and steps_there() == []
