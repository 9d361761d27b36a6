"""Expert load against NumPy on the same records."""

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from nviz.queries import experts
from nviz.store.run_data import RunData
from run_folder import RunFolder, expert_record


def opened(run: RunFolder) -> RunData:
    """The run's tables, read once."""
    data = RunData(run.path, duckdb.connect(":memory:"), "run")
    data.refresh()
    return data


def share(counts: Any) -> np.ndarray:
    """Counts over their mean along the last axis."""
    array = np.asarray(counts, dtype=float)
    return array / array.mean(axis=-1, keepdims=True)


@pytest.mark.parametrize("sealed", [False, True])
def test_each_step_has_its_column_while_there_are_few(root: Path, sealed: bool) -> None:
    run, records = RunFolder(root, "a"), [expert_record(step) for step in range(20)]
    (run.seal_experts if sealed else run.append_experts)(*records)
    data = opened(run)
    assert experts.layers(data.connection) == [1, 2, 3, 4]
    found = experts.load_map(data.connection, 3)
    assert found.step_S.tolist() == list(range(20))
    np.testing.assert_allclose(found.load_ES, share([r["load"][2] for r in records]).T, rtol=1e-12)


def test_many_steps_are_averaged_into_columns(root: Path) -> None:
    run, records = RunFolder(root, "a"), [expert_record(step) for step in range(90)]
    run.append_experts(*records)
    found = experts.load_map(opened(run).connection, 1, columns=9)
    sums = np.array([r["load"][0] for r in records], dtype=float).reshape(9, 10, 16).sum(1)
    assert found.step_S.tolist() == list(range(0, 90, 10))
    np.testing.assert_allclose(found.load_ES, share(sums).T, rtol=1e-12)


def test_counts_of_ranks_are_added(root: Path) -> None:
    run = RunFolder(root, "a")
    first, second = expert_record(0), expert_record(1) | {"step": 0}
    run.append_experts(first, rank=0)
    run.append_experts(second, rank=1)
    found = experts.last_loads(opened(run).connection)
    assert found is not None
    total = np.array(first["load"]) + np.array(second["load"])
    np.testing.assert_allclose(found.load_LE, share(total), rtol=1e-12)


def test_the_later_attempt_replaces_loads_from_its_first_step_on(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts(*[expert_record(step) for step in range(20)], attempt=1)
    again = {"step": 10, "layers": [1, 2, 3, 4], "load": [[1] * 15 + [17]] * 4}
    run.append_experts(again, attempt=2)
    data = opened(run)
    assert experts.load_map(data.connection, 1).step_S.tolist() == list(range(11))
    found = experts.last_loads(data.connection)
    assert found is not None and found.step == 10
    np.testing.assert_allclose(found.load_LE[0], share([1] * 15 + [17]))


def test_a_sealed_row_is_not_added_to_its_live_one(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts({"step": 0, "layers": [0], "load": [[1, 3]]})
    run.seal_experts({"step": 0, "layers": [0], "load": [[3, 1]]})
    found = experts.last_loads(opened(run).connection)
    assert found is not None
    assert found.load_LE.tolist() == [[1.5, 0.5]]


def test_dead_and_starved_experts_are_named_from_the_newest_steps_only(root: Path) -> None:
    run = RunFolder(root, "a")
    early = {"step": 0, "layers": [2, 7], "load": [[0, 9, 9, 9], [9, 9, 9, 9]]}
    late = [
        {"step": step, "layers": [2, 7], "load": [[5, 5, 5, 5], [100, 100, 0, 1]]}
        for step in range(1, 6)
    ]
    run.append_experts(early, *late)
    looked_at, found = experts.idle_experts(opened(run).connection, last=5)
    assert looked_at == 5
    assert found == [experts.Idle(layer=7, dead=[2], starved=[3])]


def test_an_expert_that_got_a_token_lately_is_not_dead(root: Path) -> None:
    run = RunFolder(root, "a")
    loads = [[9, 0], [9, 9], [9, 0]]
    run.append_experts(*[{"step": s, "layers": [0], "load": [row]} for s, row in enumerate(loads)])
    assert experts.idle_experts(opened(run).connection) == (3, [])


def test_a_step_without_tokens_has_no_share(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts({"step": 0, "layers": [0], "load": [[0, 0]]})
    data = opened(run)
    found = experts.last_loads(data.connection)
    assert found is not None and np.isnan(found.load_LE).all()
    assert experts.idle_experts(data.connection) == (1, [])


def test_rows_without_layer_numbers_count_from_zero(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts({"step": 0, "load": [[1, 3], [2, 2]]})
    data = opened(run)
    assert experts.layers(data.connection) == [0, 1]
    assert experts.load_map(data.connection, 0).load_ES[:, 0].tolist() == [0.5, 1.5]


def test_a_row_of_another_width_is_left_out(root: Path) -> None:
    run = RunFolder(root, "a")
    rows = [{"step": step, "layers": [0], "load": [[1, 3]]} for step in range(3)]
    run.append_experts(*rows, {"step": 3, "layers": [0], "load": [[1, 2, 3]]})
    assert experts.load_map(opened(run).connection, 0).step_S.tolist() == [0, 1, 2]


def test_layers_may_differ_in_width(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts({"step": 0, "layers": [0, 1], "load": [[1, 3], [1, 1, 1]]})
    found = experts.last_loads(opened(run).connection)
    assert found is not None
    np.testing.assert_array_equal(found.load_LE, [[0.5, 1.5, np.nan], [1.0, 1.0, 1.0]])


def test_a_run_without_experts_has_empty_answers(root: Path) -> None:
    connection = opened(RunFolder(root, "a")).connection
    assert experts.layers(connection) == []
    assert experts.last_loads(connection) is None
    assert experts.idle_experts(connection) == (0, [])
    assert len(experts.load_map(connection, 0).step_S) == 0
