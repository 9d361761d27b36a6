"""A run stopped at any instant and started again is the run that was never stopped, to the bit."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nmoe_kernels import KernelError
from nmoe_kernels.rdep import ExpertParallel, Settings
from nmoe_train.config import Config
from nmoe_train.errors import TrainError
from nmoe_train.loop import Outcome

Tiny = Callable[..., Config]
Run = Callable[..., Outcome]
Rows = Callable[..., list[dict[str, Any]]]
Saved = Callable[[Path, int], dict[str, torch.Tensor]]
STEPS = 6
SAME = ("loss/train", "loss/ce", "loss/balance", "grad_norm", "lr/dense", "router/load_imbalance")


class Crash(BaseException):
    """The end of the process, as far as the loop can tell."""


def crash_after(step: int) -> Callable[[dict[str, Any]], None]:
    def hook(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise Crash

    return hook


def histories(rows: Rows, folder: Path) -> dict[int, dict[str, Any]]:
    """The latest attempt's record of each step."""
    attempts = json.loads((folder / "run.json").read_text())["attempt"]
    found: dict[int, dict[str, Any]] = {}
    for attempt in range(1, attempts + 1):
        if list((folder / "metrics").glob(f"{attempt}-0*")):
            found |= {row["step"]: row for row in rows(folder, attempt)}
    return found


@pytest.fixture
def same_end(tiny: Tiny, run: Run, rows: Rows, saved: Saved, tmp_path: Path) -> Callable[..., None]:
    """Compare a run with one of the same configuration that was never stopped."""

    def compare(config: Config, **overrides: Any) -> None:
        whole = tiny(**overrides, **{"run.dir": str(tmp_path / "whole")})
        run(whole)
        want, got = histories(rows, whole.run.dir), histories(rows, config.run.dir)
        assert sorted(got) == sorted(want) == list(range(1, STEPS + 1))
        for step in want:
            for name in SAME:
                # A number that is not finite is a word in a live file; NaN is equal to nothing.
                pair = [repr(float(record[step][name])) for record in (got, want)]
                assert pair[0] == pair[1], (step, name)
        before, after = (saved(folder, STEPS) for folder in (whole.run.dir, config.run.dir))
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name]), name
        ends = [json.loads((f / "run.json").read_text()) for f in (whole.run.dir, config.run.dir)]
        assert ends[0]["status"] == ends[1]["status"] == "completed"
        assert ends[0]["results"] == ends[1]["results"]

    return compare


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6])
def test_a_crash_before_the_save_of_any_step(
    tiny: Tiny, run: Run, same_end: Callable[..., None], step: int
) -> None:
    with pytest.raises(Crash):
        run(tiny(), crash_after(step))
    outcome = run(tiny())
    assert (outcome.status, outcome.step) == ("completed", STEPS)
    same_end(tiny())


@pytest.mark.parametrize("setting", ["gqa", "bf16", "recompute", "micro"])
def test_whatever_is_trained(
    tiny: Tiny, run: Run, same_end: Callable[..., None], setting: str
) -> None:
    overrides: dict[str, Any] = {
        "gqa": {"model.attention.kind": "gqa", "model.tie_embeddings": True},
        "bf16": {"precision.dtype": "bf16"},
        "recompute": {"train.recompute": "layer"},
        "micro": {"train.micro_batch_size": 2, "model.moe.z_loss": 0.01},
    }[setting]
    with pytest.raises(Crash):
        run(tiny(**overrides), crash_after(3))
    run(tiny(**overrides))
    same_end(tiny(**overrides), **overrides)


def test_updates_that_were_skipped(
    tiny: Tiny, run: Run, same_end: Callable[..., None], poison: Callable[..., None], rows: Rows
) -> None:
    # Adam's bias correction counts updates, and after step 4 only two were made.
    poison({1, 3})
    with pytest.raises(Crash):
        run(tiny(), crash_after(5))
    run(tiny())
    meta = tiny().run.dir / "checkpoints" / "step-00000006" / "meta.json"
    assert json.loads(meta.read_text())["updates"] == 4
    assert [rows(tiny().run.dir)[n]["grad_norm"] for n in (0, 2)] == ["NaN", "NaN"]
    same_end(tiny())


def test_crash_upon_crash(tiny: Tiny, run: Run, same_end: Callable[..., None]) -> None:
    for step in (1, 3, 3, 5, 6):
        with pytest.raises(Crash):
            run(tiny(), crash_after(step))
    run(tiny())
    record = json.loads((tiny().run.dir / "run.json").read_text())
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 0, 2, 2, 4, 4]
    assert [attempt["attempt"] for attempt in record["attempts"]] == [1, 2, 3, 4, 5, 6]
    same_end(tiny())


@pytest.mark.parametrize("flush", [1, 3, 5, 7, 8])
def test_a_crash_in_the_middle_of_a_save(
    tiny: Tiny,
    run: Run,
    same_end: Callable[..., None],
    fork: Callable[..., Any],
    flush: int,
) -> None:
    real, armed, left = os.fsync, False, flush

    def dying(descriptor: int) -> None:
        nonlocal left
        left -= armed
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    def arm(record: dict[str, Any]) -> None:
        nonlocal armed
        armed = record["step"] >= 4

    def dies() -> None:
        os.fsync = dying
        run(tiny(), arm)

    assert fork(dies).wait()[0] == -signal.SIGKILL
    run(tiny())
    same_end(tiny())


def test_a_killed_process(
    tiny: Tiny,
    run: Run,
    same_end: Callable[..., None],
    fork: Callable[..., Any],
) -> None:
    def killed(step: int) -> Callable[[], object]:
        def kill(record: dict[str, Any]) -> None:
            if record["step"] == step:
                os.kill(os.getpid(), signal.SIGKILL)

        return lambda: run(tiny(), kill)

    for step in (3, 5):
        assert fork(killed(step)).wait()[0] == -signal.SIGKILL
    # The lock went with the process.
    run(tiny())
    same_end(tiny())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    tiny: Tiny,
    run: Run,
    same_end: Callable[..., None],
    saved: Saved,
    events: Callable[[Path], list[dict[str, Any]]],
    number: signal.Signals,
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def send(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            os.kill(os.getpid(), number)

    outcome = run(tiny(), send)
    assert (outcome.status, outcome.step, outcome.stopped_by) == ("interrupted", 3, number)
    assert outcome.results == {}
    assert saved(tiny().run.dir, 3)
    record = json.loads((tiny().run.dir / "run.json").read_text())
    assert (record["status"], record["step"]) == ("interrupted", 3)
    assert events(tiny().run.dir)[-1]["status"] == "interrupted"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert run(tiny()).step == STEPS
    same_end(tiny())


def test_a_second_signal_ends_it_at_once(tiny: Tiny, run: Run, saved: Saved) -> None:
    def send_two(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), send_two)
    assert not (tiny().run.dir / "checkpoints" / "step-00000003").exists()
    assert json.loads((tiny().run.dir / "run.json").read_text())["status"] == "interrupted"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert run(tiny()).step == STEPS


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("a fault"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_error_after_the_last_step_is_the_runs_end_too(
    tiny: Tiny,
    run: Run,
    same_end: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    events: Callable[[Path], list[dict[str, Any]]],
    error: BaseException,
    status: str,
) -> None:
    import nmoe_train.loop as loop

    def refuse(*_: object) -> float:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(loop, "unigram_loss", refuse)
        with pytest.raises(type(error)):
            run(tiny())
    record = json.loads((tiny().run.dir / "run.json").read_text())
    assert (record["status"], record["step"]) == (status, STEPS)
    assert record["ended_unix_s"] is not None
    last = events(tiny().run.dir)[-2:]
    assert [event["event"] for event in last] == ["fault", "end"]
    assert last[0]["what"] == (str(error) or "KeyboardInterrupt")
    assert last[1]["status"] == status
    assert run(tiny()).status == "completed"
    same_end(tiny())


def test_an_error_in_the_last_validation_fails_the_run(
    tiny: Tiny, run: Run, same_end: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import nmoe_train.loop as loop

    def refuse(*_: object, **__: object) -> float:
        raise TrainError("E-DATA-HELD-OUT", "nothing to predict", "hold out more")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "validation_loss", refuse)
        with pytest.raises(TrainError):
            run(tiny())
    record = json.loads((tiny().run.dir / "run.json").read_text())
    assert (record["status"], record["results"]) == ("failed", {})
    assert run(tiny()).status == "completed"
    same_end(tiny())


def test_tokens_lost_in_the_last_validation_fail_the_run(
    tiny: Tiny, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nmoe_train.loop as loop

    def killed(*_: object) -> float:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        # All steps are made and saved: what is left to the next attempt is the validation.
        patch.setattr(loop, "unigram_loss", killed)
        run(tiny())
    config = tiny()
    experts = ExpertParallel(
        None,
        experts=config.model.moe.experts,
        width=config.model.width,
        slots=config.model.moe.top_k,
        tokens_max=config.train.batch_size * config.train.seq_len,
        dtype=torch.float32,
        device="cpu",
        settings=Settings(capacity=0.1),
    )
    with experts, pytest.raises(KernelError, match="E-RDEP-CAPACITY"):
        run(config, experts=experts)
    assert json.loads((config.run.dir / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_last_count_interrupts_at_once(
    tiny: Tiny,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    events: Callable[[Path], list[dict[str, Any]]],
    number: signal.Signals,
) -> None:
    import nmoe_train.loop as loop

    def signalled(*_: object) -> float:
        os.kill(os.getpid(), number)
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(loop, "unigram_loss", signalled)
        with pytest.raises(KeyboardInterrupt, match=number.name):
            run(tiny())
    assert json.loads((tiny().run.dir / "run.json").read_text())["status"] == "interrupted"
    assert events(tiny().run.dir)[-2]["what"] == number.name
    assert run(tiny()).status == "completed"


def test_a_completed_run_trains_nothing_more(tiny: Tiny, run: Run) -> None:
    first = run(tiny())

    def files() -> dict[str, bytes]:
        folder = tiny().run.dir
        return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    before = files()
    steps: list[Any] = []
    again = run(tiny(), steps.append)
    assert steps == []
    assert (again.status, again.step) == ("completed", STEPS)
    assert again.results == first.results
    assert again.results.keys() == {"loss/validation", "loss/unigram"}
    assert files() == before


def test_a_completed_run_goes_on_when_given_more_steps(
    tiny: Tiny, run: Run, rows: Rows, tmp_path: Path
) -> None:
    steady = {"schedule.warmup": 128.0, "schedule.decay": 0.0}
    run(tiny(**steady, **{"train.steps": 3}))
    outcome = run(tiny(**steady))
    assert (outcome.status, outcome.step) == ("completed", STEPS)
    record = json.loads((tiny().run.dir / "run.json").read_text())
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 3]
    assert record["steps"] == STEPS
    whole = tiny(**steady, **{"run.dir": str(tmp_path / "whole")})
    run(whole)
    want, got = histories(rows, whole.run.dir), histories(rows, tiny().run.dir)
    assert [got[n]["loss/train"] for n in got] == [want[n]["loss/train"] for n in want]


def test_another_number_of_steps_is_a_warning_about_shares_of_the_run(
    tiny: Tiny, data: Any
) -> None:
    from nmoe_train.loop import Observer, train
    from nmoe_train.parallel.groups import ALONE

    def messages(config: Config) -> list[str]:
        observer = Observer()
        heard: list[str] = []
        observer.message = heard.append  # type: ignore[method-assign]  # an observer of one hook
        train(config, data, ALONE, observer)
        return heard

    assert messages(tiny(**{"train.steps": 3})) == []
    resuming, warning = messages(tiny(**{"train.steps": 5}))
    assert resuming == "resuming from step-00000003"
    assert warning.startswith("warning train.steps 3 -> 5: ")
    assert "shares of the run" in warning
    again = tiny().run.dir / "run.json"
    again.unlink()
    assert messages(tiny(**{"train.steps": 5})) == ["resuming from step-00000005"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optimizer.lr": 1e-3}, "optimizer.lr 0.003 -> 0.001"),
        ({"run.seed": 4}, "run.seed 0 -> 4"),
        ({"model.moe.top_k": 1}, "model.moe.top_k 2 -> 1"),
        ({"train.batch_size": 8}, "train.batch_size 4 -> 8"),
    ],
)
def test_a_change_of_the_result_is_refused_and_named(
    tiny: Tiny, run: Run, change: dict[str, Any], named: str
) -> None:
    run(tiny(**{"train.steps": 2}))
    with pytest.raises(TrainError) as caught:
        run(tiny(**change))
    assert caught.value.code == "E-RESUME-CONFIG"
    assert named in str(caught.value)
    assert str(caught.value).count(" -> ") == 1
    assert "--allow-changes" in str(caught.value)
    assert len(json.loads((tiny().run.dir / "run.json").read_text())["attempts"]) == 1


def test_a_change_goes_through_when_allowed(tiny: Tiny, run: Run, rows: Rows) -> None:
    run(tiny(**{"train.steps": 2}))
    changed = tiny(**{"optimizer.lr": 1e-3, "schedule.decay": 0.0})
    outcome = run(changed, allow_changes=True)
    assert outcome.step == STEPS
    assert rows(changed.run.dir, 2)[0]["lr/dense"] == pytest.approx(1e-3)
    # The next checkpoint is the new configuration's.
    assert run(changed).status == "completed"


def test_other_data_is_another_run(tiny: Tiny, run: Run, tmp_path: Path, data: Any) -> None:
    import dataclasses

    from nmoe_train.loop import Observer, train
    from nmoe_train.parallel.groups import ALONE

    run(tiny(**{"train.steps": 2}))
    other = dataclasses.replace(data, fingerprint="other")
    with pytest.raises(TrainError, match=r"data \S+ -> other"):
        train(tiny(), other, ALONE, Observer())


def test_a_damaged_newest_checkpoint_is_reported_and_the_run_still_ends_the_same(
    tiny: Tiny,
    run: Run,
    same_end: Callable[..., None],
    events: Callable[[Path], list[dict[str, Any]]],
) -> None:
    with pytest.raises(Crash):
        run(tiny(), crash_after(5))
    body = tiny().run.dir / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    body.write_bytes(body.read_bytes()[:-1] + b"\x7f")
    run(tiny())
    faults = [event for event in events(tiny().run.dir) if event["event"] == "fault"]
    assert [fault for fault in faults if str(body) in fault["what"]]
    assert json.loads((tiny().run.dir / "run.json").read_text())["attempts"][1]["from_step"] == 2
    same_end(tiny())
    from nmoe_train.checkpoint import newest_sound_checkpoint

    checkpoint, problems = newest_sound_checkpoint(tiny().run.dir / "checkpoints")
    assert checkpoint is not None and checkpoint.step == STEPS and problems == []


def test_attempts_keep_their_histories(tiny: Tiny, run: Run, rows: Rows) -> None:
    with pytest.raises(Crash):
        run(tiny(), crash_after(5))
    run(tiny())
    assert [row["step"] for row in rows(tiny().run.dir, 1)] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows(tiny().run.dir, 2)] == [5, 6]
    first, second = (
        next(row for row in rows(tiny().run.dir, attempt) if row["step"] == 5) for attempt in (1, 2)
    )
    assert first["loss/train"] == second["loss/train"]
