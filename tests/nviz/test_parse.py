"""Lines of metrics and experts as tables: the fast way and the careful one, and what is skipped."""

import json
import math
import random

import pytest
from nviz.store.parse import experts_table, metrics_table, parse_lines
from run_folder import expert_record, plain, record


def test_two_objects_on_one_line_are_no_record() -> None:
    parsed = metrics_table(b'{"step": 1}{"step": 2}\n{"step": 3}\n')
    assert (parsed.table["step"].to_pylist(), parsed.skipped) == ([3], 1)


def random_lines(seed: int) -> bytes:
    """Lines of which some make Arrow's reader give up."""
    drawn = random.Random(seed)
    odd = [math.nan, math.inf, None, 3, 2**40, -0.0, 1e-300]
    lines = []
    for step in range(drawn.randrange(1, 40)):
        row = {"step": step, "a/b": drawn.random(), "count": drawn.randrange(9)}
        if drawn.random() < 0.3:
            row["some"] = plain(drawn.choice(odd))
        lines.append(json.dumps(row))
        if seed % 3 == 0 and drawn.random() < 0.1:
            lines.append(drawn.choice(['{"step": 1', "[]", "{}", '{"step": "x"}', '{"step": 1}{"']))
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize("seed", range(40))
def test_the_fast_and_the_slow_way_give_the_same_table(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_lines(seed)
    fast = metrics_table(data)
    monkeypatch.setattr("nviz.store.parse._fast", lambda _: None)
    slow = metrics_table(data)
    assert fast.skipped == slow.skipped
    # repr, as NaN differs from itself.
    rows = [repr(sorted(row.items())) for row in slow.table.to_pylist()]
    names = slow.table.column_names
    kept = fast.table.select([name for name in fast.table.column_names if name in names])
    assert [repr(sorted(row.items())) for row in kept.to_pylist()] == rows


def test_plain_lines_take_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: bytes) -> None:
        raise AssertionError("read line by line")

    monkeypatch.setattr("nviz.store.parse.parse_lines", refuse)
    metrics = "".join(json.dumps(record(step)) + "\n" for step in range(20)).encode()
    assert metrics_table(metrics).table.num_rows == 20
    loads = "".join(json.dumps(expert_record(step)) + "\n" for step in range(20)).encode()
    assert experts_table(loads).table.num_rows == 20


def test_expert_lines_of_a_wrong_shape_are_skipped() -> None:
    good = expert_record(0, 1, 2)
    lines = [
        good,
        {"step": 1},
        {"step": 2, "load": "x"},
        {"step": 3, "load": [1]},
        good | {"bias": 3},
    ]
    parsed = experts_table("".join(json.dumps(line) + "\n" for line in lines).encode())
    assert (parsed.table.num_rows, parsed.skipped) == (2, 3)


def test_blank_lines_are_no_lines() -> None:
    assert parse_lines(b'\n  \n{"a": 1}\r\n') == ([{"a": 1}], 0)
