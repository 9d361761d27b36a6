"""What a drill refuses, what it writes when it fails, and that an order is obeyed once."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nmoe_train.drill.command import drill_command
from nmoe_train.drill.inject import Injected
from nmoe_train.drill.orders import Orders, order
from nmoe_train.drill.plan import PlannedFault
from nmoe_train.drill.report import _row as fault_row
from nmoe_train.errors import TrainError

ORDERS, THREADS = 100, 4


def test_a_drill_that_fails_says_so_in_its_report(tmp_path: Path) -> None:
    report, sets = tmp_path / "report.json", ["parallel.tp=2"]
    with pytest.raises(TrainError) as error:
        drill_command(1, 2, "kill", 0, report, tmp_path / "runs", sets)
    assert error.value.code == "E-DRILL"
    content = json.loads(report.read_text())
    assert content["passed"] is False
    assert content["reason"] == str(error.value)
    assert "1 workers cannot hold this layout" in content["reason"]
    assert (content["workers"], content["set"]) == (1, sets)
    assert content["cores"] >= 1


def test_an_unknown_kind_of_fault_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="there is no fault 'flood'"):
        drill_command(2, 1, "kill,flood", 0, None, tmp_path / "runs", [])


def test_a_fault_that_a_later_one_overtakes_is_survived_and_one_without_a_trace_is_not() -> None:
    recovery = {"time_unix_s": 12.0, "event": "recovery", "steps_lost": 1}

    def full_disk(unix_s: float) -> Injected:
        return Injected(PlannedFault("full-disk", 3, 0.0, (1,)), (1,), (1,), unix_s, 3)

    before, after = fault_row(full_disk(10.0), [recovery]), fault_row(full_disk(13.0), [recovery])
    assert before.overtaken and before.recovered and before.detected_s is None
    assert not after.overtaken and not after.recovered
    alert = {"time_unix_s": 11.0, "event": "alert", "what": "not saved, training goes on: full"}
    assert not fault_row(full_disk(10.0), [alert, recovery]).recovered, "no checkpoint came after"
    killed = Injected(PlannedFault("kill", 3, 0.0, (1,)), (1,), (1,), 10.0, 3)
    assert not fault_row(killed, [recovery]).recovered, "nobody told of the worker"


def test_an_order_is_taken_once_though_several_threads_look_for_it(tmp_path: Path) -> None:
    for number in range(ORDERS):
        order(tmp_path, 0, number, kind="slow-disk", count=number)
    order(tmp_path, 1, 0, kind="slow-disk", count=-1)
    orders = Orders(tmp_path, 0)

    def take_all(_thread: int) -> list[int]:
        taken = []
        while (told := orders.take("slow-disk")) is not None:
            taken.append(told["count"])
        return taken

    with ThreadPoolExecutor(THREADS) as threads:
        taken = [number for found in threads.map(take_all, range(THREADS)) for number in found]
    assert sorted(taken) == list(range(ORDERS))
