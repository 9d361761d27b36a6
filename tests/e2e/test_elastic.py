"""Runs that go on by themselves: drills, a signal to the launcher, a rank with other gradients.

A drill compares its losses with those of an undisturbed run, within 1e-5 as sums in fp32 are taken
in another order on another layout; they were measured within 2e-7.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import broken_worker
import pyarrow.parquet as pq
import pytest
from commands import checkpoint_hashes
from layout_runs import Case, Results, metrics, run_cases
from nmoe_data.prep import prep
from nmoe_train.config import load_config
from nmoe_train.drill.plan import KINDS, TAIL_STEPS, plan_faults
from nmoe_train.drill.report import losses, read_events
from nmoe_train.drill.run import Drill
from nmoe_train.elastic.launcher import Launcher
from nmoe_train.presets import DRILL

WORKERS = 4


def drill(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Runs the command; its report and what it printed. It must have passed."""
    report = folder / "report.json"
    command = ["drill", "--workers", str(WORKERS), "--json", str(report), *options]
    done = subprocess.run(
        [sys.executable, "-m", "nmoe_train", *command, "--out", str(folder / "runs")],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text()), done.stdout


@pytest.mark.slow
def test_twenty_random_kills_are_survived_with_no_trace_in_the_losses(tmp_path: Path) -> None:
    report, output = drill(tmp_path, "--kills", "20", "--seed", "7")
    assert output.splitlines()[-1] == report["sentence"]
    assert report["sentence"].startswith("passed: all 20 of 20 faults survived")
    assert len(report["faults"]) == 20
    run = tmp_path / "runs" / "disturbed"
    events = read_events(run)
    lost = [event["worker"] for event in events if event["event"] == "fault"]
    # On a busy host one or another is counted out for its silence, too, and comes back.
    assert len(set(lost)) >= 20, "each kill is told of"
    recoveries = [event for event in events if event["event"] == "recovery"]
    assert {event["from"] for event in recoveries} <= {"memory", "disk"}
    # From memory a death costs the steps since the last copy that all have finished.
    assert any(event["from"] == "memory" and event["steps_lost"] <= 3 for event in recoveries)
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "completed"
    assert len(losses(run)) == report["steps"]


@pytest.mark.slow
def test_each_kind_of_fault_is_noticed_and_survived(tmp_path: Path) -> None:
    report, _ = drill(tmp_path, "--kills", "6", "--faults", ",".join(KINDS), "--seed", "3")
    rows = {row["kind"]: row for row in report["faults"]}
    assert rows.keys() == set(KINDS)
    events = read_events(tmp_path / "runs" / "disturbed")
    # A stopped worker is counted out after the deadline, and hurts nobody when it wakes up: what it
    # was about to write for its generation is written by nobody.
    silent = [e["detected_s"] for e in events if "did not answer" in e.get("what", "")]
    late = [e for e in events if "did not leave its generation" in e.get("what", "")]
    assert silent or late
    assert all(seconds >= 5.0 for seconds in silent)
    # Exactly one side of a split network goes on: at no time do two attempts make steps.
    run = tmp_path / "runs" / "disturbed"
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    begun = [e["step"] for e in events if e["event"] in ("start", "resume")]
    # One that was lost between its record and its event has told of neither step.
    noted = iter(attempt["from_step"] for attempt in attempts)
    assert all(step in noted for step in begun)
    spans = [span for n in range(len(attempts)) if (span := times_of_steps(run, n + 1))]
    assert len(spans) >= 2  # an attempt that ended before its first step has none
    for before, after in pairwise(spans):
        assert before[1] <= after[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sets"),
    [
        ("tp2", ["parallel.tp=2", "parallel.fsdp=true", "parallel.ep=2"]),
        ("pp2", ["parallel.pp=2", "parallel.ep=2", "train.micro_batch_size=2"]),
    ],
)
def test_kills_are_survived_where_layers_are_split_and_weights_are_sharded(
    tmp_path: Path, layout: str, sets: list[str]
) -> None:
    options = [word for override in sets for word in ("--set", override)]
    report, _ = drill(tmp_path, "--kills", "2", "--seed", "2", *options)
    assert len(report["faults"]) == 2
    assert all(layout in row["layout_after"] for row in report["faults"])
    records = metrics(tmp_path / "runs" / "disturbed")
    assert {2, 4} >= {row["active_ranks"] for row in records.values()} >= {4}


def times_of_steps(run: Path, attempt: int) -> tuple[float, float] | None:
    """When the first and the last record of any rank in an attempt was made."""
    times: list[float] = []
    for path in (run / "metrics").glob(f"{attempt}-*"):
        if path.suffix == ".parquet" and "experts" not in path.name:
            times += pq.read_table(path)["time_unix_s"].to_pylist()
        elif "experts" not in path.name:
            times += [json.loads(line)["time_unix_s"] for line in path.read_text().splitlines()]
    return (min(times), max(times)) if times else None


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    texts = (f"{number} tokens go to some experts " * (number % 5 + 1) for number in range(300))
    lines = (json.dumps({"text": text}) for text in texts)
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    prep(folder / "text.jsonl", folder / "data", tokenizer="bytes", held_out=0.2)
    return folder / "data"


@pytest.mark.slow
def test_a_signal_to_the_launcher_ends_the_run_with_a_checkpoint_and_it_goes_on(
    tmp_path: Path, data_dir: Path
) -> None:
    run = tmp_path / "run"
    sets = {"run.dir": run, "data.dir": data_dir, "train.steps": 60, "checkpoint.every": 40}
    overrides = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "nmoe_train", "elastic", str(DRILL), "--workers", "2"]

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*command, *overrides, "--set", "parallel.ep=2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    process = start()
    live, deadline = run / "metrics" / "1-0.jsonl", time.monotonic() + 240
    while not (live.exists() and live.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{record['step']:08d}"]

    process = start()
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert f"resuming from step-{record['step']:08d}" in output
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
    assert checkpoint_hashes(run)


@pytest.mark.slow
def test_workers_that_break_by_themselves_are_named_and_given_up(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process that workers are forked from looks here for what it should import.
    monkeypatch.setenv("PYTHONPATH", str(Path(broken_worker.__file__).parent))
    run, restarts = tmp_path / "run", 1
    sets = {"run.dir": run, "data.dir": data_dir, "train.steps": 120, "elastic.restarts": restarts}
    sets["elastic.deadline_s"] = 60  # nobody here is counted out for silence
    config = load_config(DRILL, [f"{key}={json.dumps(v, default=str)}" for key, v in sets.items()])
    run.mkdir()
    until_s = time.monotonic() + 400
    with Launcher(config, 3, "broken_worker:broken_work", log=tmp_path / "log") as launcher:
        while not launcher.ended:
            launcher.poll()
            assert time.monotonic() < until_s, (tmp_path / "log").read_text()
    assert launcher.exit_code == 0, (tmp_path / "log").read_text()
    assert len(losses(run)) == 120
    faults = [e["what"] for e in read_events(run) if e["event"] == "fault"]
    own = [what for what in faults if "failed: AcceleratorError: CUDA error" in what]
    crashes = [what for what in faults if "was ended by SIGSEGV" in what]
    assert own or crashes
    assert len(own) <= 1 + restarts
    assert len(crashes) <= 1 + restarts
    assert not [what for what in faults if "E-PEER" in what], "nobody is blamed for a lost peer"


SLOW_LAYOUTS = {
    "tp": {"parallel.tp": 2},
    "pp": {"parallel.pp": 2, "train.micro_batch_size": 6},
    "fsdp": {"parallel.fsdp": "true"},
    "ep": {"parallel.ep": 2},
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Results:
    """Runs in which one rank differs from the others, in its gradients or in its pace."""
    odd = {"train.steps": 4, "telemetry.gradient_checksum_every": 1, "checkpoint.every": 4}
    slow = {"train.steps": 6, "telemetry.straggler_steps": 2, "eval.sequences": 6}
    cases = [Case("odd", 3, odd, corrupt=(1, 3))]
    cases += [Case(name, 2, slow | sets, slow=(1, 1.0)) for name, sets in SLOW_LAYOUTS.items()]
    return run_cases(tmp_path_factory.mktemp("watched"), data_dir, cases, processes=3)


def alerts(run: Path, words: str) -> list[tuple[int, int]]:
    """Steps and ranks of the alerts that have these words."""
    found = [e for e in read_events(run) if e["event"] == "alert" and words in e["what"]]
    return [(event["step"], event["rank"]) for event in found]


@pytest.mark.slow
def test_a_rank_whose_summed_gradients_differ_is_named(watched: Results) -> None:
    assert [rank.result["code"] for rank in watched.ranks("odd")] == [0, 0, 0]
    # From then on its weights differ, but not what all ranks' gradients add up to.
    assert alerts(watched.run("odd"), "gradients") == [(3, 1)]
    assert len(metrics(watched.run("odd"))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_LAYOUTS)
def test_a_rank_that_is_slow_in_its_forward_pass_is_named_on_every_layout(
    watched: Results, name: str
) -> None:
    assert [rank.result["code"] for rank in watched.ranks(name)] == [0, 0]
    # The other waits for it in collectives or messages, which is not its own work.
    assert {rank for _, rank in alerts(watched.run(name), "times as long")} == {1}


def test_what_happens_in_a_drill_is_a_function_of_its_seed() -> None:
    plans = [plan_faults(KINDS, 12, 4, seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert {fault.kind for fault in plans[0].faults} == set(KINDS)
    steps = [fault.step for fault in plans[0].faults]
    assert steps == sorted(steps)
    assert plans[0].steps == steps[-1] + TAIL_STEPS
    assert Drill(Path(), 4, plans[0], str).plan.steps == plans[0].steps
