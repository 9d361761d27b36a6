"""The benchmark of the exchange: what it refuses, what it counts, and a run of two processes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from nmoe_kernels import KernelError
from nmoe_kernels.bench.exchange.command import Options, run_exchange
from nmoe_kernels.bench.exchange.problem import most_crossing


def options(shape: str) -> Options:
    return Options(
        device="cpu",
        shapes=[shape],
        routings="zipf",
        dtype="float32",
        transports="collective",
        peers="all_to_all",
        blocks="8",
        repeats=1,
        json_file=None,
        chart_file=None,
    )


def test_one_process_alone_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(KernelError, match="start it with torchrun"):
        run_exchange(options("tiny"))


def test_experts_that_the_processes_do_not_divide_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(KernelError, match="3 processes do not divide the 16 experts") as error:
        run_exchange(options("tiny"))
    assert error.value.code == "E-BENCH"


def test_the_bytes_that_must_cross_are_those_of_the_busiest_rank() -> None:
    """By hand: rank 2 gets 5 + 7, rank 1 sends 2 + 7; what stays where it is does not cross."""
    assert most_crossing(torch.tensor([[90, 1, 5], [2, 90, 7], [0, 3, 90]])) == 12
    assert most_crossing(torch.tensor([[90, 1, 5], [2, 90, 7], [0, 3, 90]]).t()) == 12
    assert most_crossing(torch.tensor([[90]])) == 0


@pytest.mark.slow
def test_two_processes_verify_and_time_every_contender(tmp_path) -> None:
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "nmoe_kernels", "bench", "rdep", "--device", "cpu", "--shape", "tiny"),
        *("--routing", "zipf", "--repeats", "2", "--json", str(report)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["contender"]: row for row in json.loads(report.read_text())["rows"]}
    assert "it runs on cuda" in rows["p2p"]["note"]
    for name in ("collective", "all_to_all, gloo"):
        row = rows[name]
        assert "note" not in row and row["error"] < 0.01
        for stage in ("dispatch", "combine"):
            rate = row["crossing_bytes"] / row[f"{stage}_ms"] / 1e6
            assert row[f"{stage}_gbps"] == pytest.approx(rate)
