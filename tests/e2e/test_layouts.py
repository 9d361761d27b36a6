"""Training on several processes: the result is that of one, whatever the layout, stops and faults.

All cases but the last tests' run in the processes of one torchrun, as their start costs more than
they do. Batches hold 12 sequences: 1, 2 or 4 ranks, and 1 or 3 micro-batches on each.

Curves were measured within 2e-7, weights within 8e-7 and moments within 4e-6 of one process's
(`layout_runs` has the tolerances). A single process that only changes its micro-batches is as far
from itself.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import checkpoint_hashes
from layout_cases import TERMINATED, assert_trains_as_one_process
from layout_runs import (
    CONFIG,
    CURVES,
    EXPERTS,
    Case,
    Results,
    assert_codes,
    assert_near,
    assert_near_state,
    make_shards,
    metrics,
    run_cases,
    saved,
    torchrun,
)

pytestmark = pytest.mark.slow

LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
MICRO_BATCHES = [1, 3]
STEPS = 20
SHORT = {"parallel.ep": 2, "train.steps": 6, "checkpoint.every": 3}
LONG = {"parallel.ep": 2, "train.steps": 40, "checkpoint.every": 2}


def parity_name(dp: int, ep: int, micro_batches: int) -> str:
    return f"dp{dp}-ep{ep}-micro{micro_batches}"


def parity_cases() -> list[Case]:
    """Each layout, and the single process, with and without accumulation."""
    return [
        Case(
            parity_name(dp, ep, count),
            dp,
            {"parallel.ep": ep, "train.micro_batch_size": 12 // dp // count},
        )
        for dp, ep in [(1, 1), *LAYOUTS]
        for count in MICRO_BATCHES
    ]


def layout(dp: int, ep: int) -> dict[str, Any]:
    return {"processes": dp, "sets": {"parallel.ep": ep, "train.micro_batch_size": 12 // dp}}


CASES = [
    *parity_cases(),
    Case("stopped", **layout(4, 2), run="same", signal=(1, 7)),
    Case("resumed", **layout(4, 2), run="same"),
    Case("travel-1", **layout(4, 2), run="travel", signal=(3, 4)),
    Case("travel-2", **layout(2, 1), run="travel", signal=(0, 4)),
    Case("travel-3", **layout(1, 1), run="travel", signal=(0, 4)),
    Case("travel-4", **layout(4, 4), run="travel"),
    Case("undisturbed", 2, SHORT),
    Case("dead-1", 2, SHORT, run="dead", fail=(1, 1, "dies")),
    Case("dead-2", 2, SHORT, run="dead", fail=(0, 3, "dies")),
    Case("dead-3", 2, SHORT, run="dead", fail=(0, 5, "dies")),
    Case("dead-4", 2, SHORT, run="dead"),
    Case("full-1", 2, SHORT, run="full", fail=(1, 1, "full")),
    Case("full-2", 2, SHORT, run="full"),
    Case("changed", 2, {**SHORT, "optimizer.lr": 1e-3}, run="full"),
    Case("again", 2, {**SHORT, "train.recompute": "layer", "parallel.rdep.keep": "fetch"}),
    Case("bounded", 2, {**SHORT, "parallel.rdep.capacity": 0.5}),
    Case("dropping", 2, {**SHORT, "parallel.rdep.capacity": 0.5, "parallel.rdep.overflow": "drop"}),
    Case("long", 2, LONG),
]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of short documents."""
    return make_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def pool(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, trained."""
    return run_cases(tmp_path_factory.mktemp("pool"), data_dir, CASES, processes=4)


def error_lines(pool: Results, name: str) -> list[str]:
    """Lines of all ranks of a case that report an error; none of them is a traceback."""
    printed = [line for rank in pool.ranks(name) for line in rank.output.splitlines()]
    assert not [line for line in printed if "Traceback" in line]
    return [line for line in printed if line.startswith("error ")]


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize(("dp", "ep"), LAYOUTS)
def test_any_layout_trains_as_one_process_does(
    pool: Results, dp: int, ep: int, micro_batches: int
) -> None:
    name, single = parity_name(dp, ep, micro_batches), parity_name(1, 1, micro_batches)
    assert_trains_as_one_process(pool, name, single, STEPS)


@pytest.mark.parametrize(("dp", "ep"), LAYOUTS)
def test_every_rank_reports_the_same_numbers(pool: Results, dp: int, ep: int) -> None:
    name = parity_name(dp, ep, 3)
    first, *others = (rank.result["steps"] for rank in pool.ranks(name))
    assert len(first) == STEPS
    for steps in others:
        assert steps == first
    records = [metrics(pool.run(name), rank) for rank in range(dp)]
    for record in records:
        for step, row in record.items():
            assert row["tokens"] == step * 12 * 32
            assert row["active_ranks"] == dp
            assert {name: row[name] for name in CURVES} == {n: first[step - 1][n] for n in CURVES}
    validations = [[row.get("loss/validation") for row in r.values()] for r in records]
    assert validations == [validations[0]] * dp
    loads = sorted(p.name for p in (pool.run(name) / "metrics").glob("*experts*"))
    assert {file.split("-")[1] for file in loads} == {"0"}, "readers add up what ranks wrote"


@pytest.mark.parametrize(("dp", "ep"), LAYOUTS)
def test_weights_start_and_stay_the_same_wherever_they_are_held(
    pool: Results, dp: int, ep: int
) -> None:
    name = parity_name(dp, ep, 1)
    (single,) = pool.ranks(parity_name(1, 1, 1))
    everything = single.weights("initial")
    ranks = pool.ranks(name)
    held = EXPERTS // ep
    for number, rank in enumerate(ranks):
        initial, final = rank.weights("initial"), rank.weights("final")
        twin = ranks[number % ep].weights("final")
        experts = {int(n.split(".")[5]) for n in initial if re.search(r"experts\.\d", n)}
        first = number % ep * held
        assert experts == set(range(first, first + held))
        assert all(torch.equal(tensor, everything[n]) for n, tensor in initial.items())
        assert all(torch.equal(tensor, twin[n]) for n, tensor in final.items())
    downs = [everything[f"model.layers.1.moe.experts.{e}.down"] for e in range(EXPERTS)]
    assert not [1 for a in downs for b in downs if a is not b and torch.equal(a, b)]


def test_each_tensor_is_written_once_by_the_first_that_holds_it(pool: Results) -> None:
    for dp, ep in LAYOUTS:
        folder = pool.run(parity_name(dp, ep, 1)) / "checkpoints" / f"step-{STEPS:08d}"
        meta = json.loads((folder / "meta.json").read_text())
        assert meta["layout"] == {"dp": dp, "tp": 1, "pp": 1, "ep": ep}
        assert sorted(meta["files"]) == [f"rank-{rank:05d}.safetensors" for rank in range(ep)]
        assert {path.name for path in folder.iterdir()} == {*meta["files"], "meta.json", "COMPLETE"}
        for name, place in meta["tensors"].items():
            expert = re.search(r"experts\.(\d+)\.", name)
            owner = int(expert[1]) // (EXPERTS // ep) if expert else 0
            assert place["file"] == f"rank-{owner:05d}.safetensors", name


def test_what_the_experts_exchange_is_recorded_on_every_rank(pool: Results) -> None:
    name = parity_name(4, 2, 1)
    record = json.loads((pool.run(name) / "run.json").read_text())
    assert record["transport"] == "collective"
    assert "transport collective" in pool.ranks(name)[0].output
    single = json.loads((pool.run(parity_name(1, 1, 1)) / "run.json").read_text())
    assert single["parameters"] == record["parameters"]
    for rank in range(4):
        for row in metrics(pool.run(name), rank).values():
            # 3 sequences of 32 tokens in 2 layers, there and back, forward and backward.
            assert 0 < row["rdep/rows"] <= 4 * 2 * 3 * 32
            assert row["rdep/bytes"] >= row["rdep/rows"] * 32 * 4
            assert row["router/dropped"] == 0
            assert row["rdep/wait_ms"] == pytest.approx(
                sum(row[f"rdep/wait_ms/{peer}"] for peer in range(2))
            )
            for stage in ("dispatch", "expert", "combine", "reduce"):
                assert row[f"time_ms/{stage}"] > 0


def test_a_signal_to_one_rank_stops_all_after_the_same_step(pool: Results) -> None:
    assert_codes(pool.ranks("stopped"), TERMINATED)
    assert [len(rank.result["steps"]) for rank in pool.ranks("stopped")] == [7] * 4
    assert [error_lines(pool, "stopped"), error_lines(pool, "resumed")] == [[], []]
    events = [json.loads(line) for line in (pool.run("stopped") / "events.jsonl").open()]
    assert [(e["event"], e["step"]) for e in events[:4]] == [
        ("start", 0),
        ("checkpoint", 7),
        ("end", 7),
        ("resume", 7),
    ]


def test_on_the_same_layout_a_stopped_run_ends_with_the_bits_of_one_never_stopped(
    pool: Results,
) -> None:
    whole = parity_name(4, 2, 1)
    assert_codes(pool.ranks("resumed"), 0)
    for rank in range(4):
        want, got = metrics(pool.run(whole), rank), metrics(pool.run("resumed"), rank)
        assert sorted(got) == sorted(want)
        for step in want:
            assert [got[step][n] for n in CURVES] == [want[step][n] for n in CURVES]
    want_state, got_state = (saved(pool.run(n), STEPS) for n in (whole, "resumed"))
    assert want_state.keys() == got_state.keys()
    assert all(torch.equal(got_state[n], want_state[n]) for n in want_state)


def test_a_run_goes_on_on_any_other_layout(pool: Results) -> None:
    for number, code in enumerate((TERMINATED, TERMINATED, TERMINATED, 0), start=1):
        assert_codes(pool.ranks(f"travel-{number}"), code)
    record = json.loads((pool.run("travel-1") / "run.json").read_text())
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 4, 8, 12]
    single = pool.run(parity_name(1, 1, 1))
    assert_near(metrics(pool.run("travel-1")), metrics(single), STEPS)
    assert_near_state(saved(pool.run("travel-1"), STEPS), saved(single, STEPS))


def test_a_rank_that_dies_anywhere_in_a_save_loses_nothing_that_was_complete(
    pool: Results,
) -> None:
    # At first rank 1, its tensors not yet flushed; then rank 0 before, and after, COMPLETE.
    # The other one does not wait for it for ever.
    assert_codes(pool.ranks("dead-1"), 2, "Died")
    assert_codes(pool.ranks("dead-2"), "Died", 2)
    assert_codes(pool.ranks("dead-3"), "Died", 2)
    assert_codes(pool.ranks("dead-4"), 0)
    record = json.loads((pool.run("dead-4") / "run.json").read_text())
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 0, 0, 3]
    want, got = pool.run("undisturbed"), pool.run("dead-4")
    assert checkpoint_hashes(got) == checkpoint_hashes(want)
    for step, row in metrics(want).items():
        assert [metrics(got)[step][n] for n in CURVES] == [row[n] for n in CURVES]


def test_a_full_disk_under_one_rank_is_one_line_and_the_run_goes_on_once_there_is_space(
    pool: Results,
) -> None:
    assert_codes(pool.ranks("full-1"), 2)
    (line,) = error_lines(pool, "full-1")
    assert line.startswith("error E-DISK-FULL: ")
    assert "rank-00001.safetensors" in line
    assert_codes(pool.ranks("full-2"), 0)
    events = [json.loads(line) for line in (pool.run("full-1") / "events.jsonl").open()]
    assert [e["event"] for e in events[:3]] == ["start", "fault", "end"]
    assert "rank 1 failed" in events[1]["what"]
    assert checkpoint_hashes(pool.run("full-2")) == checkpoint_hashes(pool.run("undisturbed"))


def test_an_error_that_befalls_all_ranks_is_one_line(pool: Results) -> None:
    assert_codes(pool.ranks("changed"), 2)
    (line,) = error_lines(pool, "changed")
    assert line.startswith("error E-RESUME-CONFIG: ")


def test_computing_and_sending_again_changes_nothing(pool: Results) -> None:
    for name in ("again", "undisturbed"):
        assert_codes(pool.ranks(name), 0)
    for rank in range(2):
        want, got = (pool.ranks(name)[rank].result["steps"] for name in ("undisturbed", "again"))
        assert got == want
    assert checkpoint_hashes(pool.run("again")) == checkpoint_hashes(pool.run("undisturbed"))
    once, again = (
        sum(metrics(pool.run(name), rank)[2]["rdep/rows"] for rank in range(2))
        for name in ("undisturbed", "again")
    )
    # Four journeys of every row; two more in the forward that is made again, one to fetch x.
    assert 4 * again == 7 * once


def test_a_bound_on_what_an_expert_takes_is_an_error_or_drops_as_configured(pool: Results) -> None:
    assert_codes(pool.ranks("bounded"), 2)
    (line,) = error_lines(pool, "bounded")
    assert line.startswith("error E-RDEP-CAPACITY: ")
    assert_codes(pool.ranks("dropping"), 0)
    counts = [
        [row["router/dropped"] for row in metrics(pool.run("dropping"), rank).values()]
        for rank in range(2)
    ]
    assert counts[0] == counts[1]
    # Half of what an even load needs: at least half of 12 * 32 tokens' 2 choices in 2 layers.
    assert all(count >= 12 * 32 * 2 * 2 // 2 for count in counts[0])


def await_steps(run: Path, attempt: int, count: int, process: "subprocess.Popen[str]") -> None:
    """Returns once rank 1 has recorded so many steps of an attempt."""
    live = run / "metrics" / f"{attempt}-1.jsonl"
    deadline = time.monotonic() + 120
    while not (live.exists() and live.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the awaited step did not come"
        time.sleep(0.005)


def test_torchrun_passes_signals_on_and_ends_all_when_one_rank_is_killed(
    pool: Results, data_dir: Path, tmp_path: Path
) -> None:
    config, run = tmp_path / "config.toml", tmp_path / "run"
    config.write_text(CONFIG)
    sets = {"run.dir": run, "data.dir": data_dir, "parallel.dp": 2, **LONG}
    overrides = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]

    def start() -> "subprocess.Popen[str]":
        return torchrun(2, "-m", "nmoe_train", "run", str(config), *overrides)

    def record() -> dict[str, Any]:
        content: dict[str, Any] = json.loads((run / "run.json").read_text())
        return content

    process = start()
    await_steps(run, 1, 3, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert f"saved at step {record()['step']}" in output
    assert (record()["status"], output.count("\ninterrupted\n")) == ("interrupted", 1), output

    process = start()
    await_steps(run, 2, 3, process)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    lines = [line for line in output.splitlines() if line.startswith("error ")]
    if lines:
        assert len(lines) == 1, output
        assert re.match(r"error E-(RDEP-)?PEER: ", lines[0]), output
        assert record()["status"] == "failed"
    else:
        # On a busy host torchrun ends the other rank before that has noticed who is gone.
        assert output.count("\ninterrupted\n") == 1, output

    process = start()
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert checkpoint_hashes(run) == checkpoint_hashes(pool.run("long"))
    want, got = metrics(pool.run("long")), metrics(run)
    assert [got[s]["loss/train"] for s in want] == [want[s]["loss/train"] for s in want]


def children(process: int) -> list[int]:
    """The processes that a process has started, in the order of their start."""
    listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    return sorted(map(int, listed.split()))


def test_a_layout_that_does_not_fit_the_processes_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    command = ("-m", "nmoe_train", "run", str(tmp_path / "config.toml"), "--set", "parallel.dp=4")
    process = torchrun(2, *command)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    (line,) = [line for line in output.splitlines() if line.startswith("error ")]
    assert line.startswith("error E-LAYOUT: parallel.dp = 4 asks for 4 processes, and 2 started; ")
    assert "--nproc-per-node 4" in line
