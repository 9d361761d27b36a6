"""Expert load against NumPy on the same records."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nviz.queries import experts
from nviz.store.experts import Block, ExpertLoads
from run_folder import RunFolder, expert_record


def opened(run: RunFolder) -> list[Block]:
    """The run's loads, read once, all of them readable."""
    loads = ExpertLoads(run.path)
    loads.refresh()
    assert loads.problems() == []
    return loads.blocks()


def share(counts: Any) -> np.ndarray:
    """Counts over their mean along the last axis."""
    array = np.asarray(counts, dtype=float)
    return array / array.mean(axis=-1, keepdims=True)


@pytest.mark.parametrize("sealed", [False, True])
def test_each_step_has_its_column_while_there_are_few(root: Path, sealed: bool) -> None:
    run, records = RunFolder(root, "a"), [expert_record(step) for step in range(20)]
    (run.seal_experts if sealed else run.append_experts)(*records)
    data = opened(run)
    assert experts.layers(data) == [1, 2, 3, 4]
    found = experts.load_map(data, 3)
    assert found.step_S.tolist() == list(range(20))
    np.testing.assert_allclose(found.load_ES, share([r["load"][2] for r in records]).T, rtol=1e-6)


def test_many_steps_are_averaged_into_columns(root: Path) -> None:
    run, records = RunFolder(root, "a"), [expert_record(step) for step in range(90)]
    run.append_experts(*records)
    found = experts.load_map(opened(run), 1, columns=9)
    sums = np.array([r["load"][0] for r in records], dtype=float).reshape(9, 10, 16).sum(1)
    assert found.step_S.tolist() == list(range(0, 90, 10))
    np.testing.assert_allclose(found.load_ES, share(sums).T, rtol=1e-6)


@pytest.mark.parametrize(("steps", "columns"), [(90, 20), (1000, 200), (1001, 200), (7, 200)])
def test_columns_lie_at_even_distances_and_none_is_left_out(
    root: Path, steps: int, columns: int
) -> None:
    run = RunFolder(root, "a")
    run.seal_experts(*[expert_record(step, layers=2, experts=4) for step in range(steps)])
    blocks = opened(run)
    for step_S in (
        experts.load_map(blocks, 1, columns).step_S,
        experts.imbalance_map(blocks, columns).step_S,
    ):
        assert len(step_S) <= columns
        assert len(set(np.diff(step_S).tolist())) == 1
    whole = experts.load_map(blocks, 1, columns=1).load_ES
    assert whole.shape == (4, 1)


def test_counts_of_ranks_are_added(root: Path) -> None:
    run = RunFolder(root, "a")
    first, second = expert_record(0), expert_record(1) | {"step": 0}
    run.append_experts(first, rank=0)
    run.append_experts(second, rank=1)
    found = experts.loads_at(opened(run))
    assert found is not None
    total = np.array(first["load"]) + np.array(second["load"])
    np.testing.assert_allclose(found.load_LE, share(total), rtol=1e-6)


def test_the_later_attempt_replaces_loads_from_its_first_step_on(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts(*[expert_record(step) for step in range(20)], attempt=1)
    again = {"step": 10, "layers": [1, 2, 3, 4], "load": [[1] * 15 + [17]] * 4}
    run.append_experts(again, attempt=2)
    data = opened(run)
    assert experts.load_map(data, 1).step_S.tolist() == list(range(11))
    found = experts.loads_at(data)
    assert found is not None and found.step == 10
    np.testing.assert_allclose(found.load_LE[0], share([1] * 15 + [17]))


def test_a_sealed_row_is_not_added_to_its_live_one(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts({"step": 0, "layers": [0], "load": [[1, 3]]})
    run.seal_experts({"step": 0, "layers": [0], "load": [[3, 1]]})
    found = experts.loads_at(opened(run))
    assert found is not None
    assert found.load_LE.tolist() == [[1.5, 0.5]]


def test_the_loads_at_a_step_are_those_recorded_at_or_before_it(root: Path) -> None:
    run, records = RunFolder(root, "a"), [expert_record(step) for step in range(10, 60, 10)]
    run.append_experts(*records)
    data = opened(run)
    for asked, given in ((10, 10), (39, 30), (40, 40), (999, 50), (None, 50), (3, 10)):
        found = experts.loads_at(data, asked)
        assert found is not None and found.step == given
        expected = share(records[given // 10 - 1]["load"])
        np.testing.assert_allclose(found.load_LE, expected, rtol=1e-6)


def test_the_imbalance_of_every_layer_is_the_busiest_over_the_mean(root: Path) -> None:
    run, records = RunFolder(root, "a"), [expert_record(step) for step in range(40)]
    run.seal_experts(*records[:25])
    run.append_experts(*records[25:])
    found = experts.imbalance_map(opened(run), columns=8)
    loads_SLE = np.array([record["load"] for record in records], dtype=float)
    each_LS = (loads_SLE.max(-1) / loads_SLE.mean(-1)).T
    expected = each_LS.reshape(4, 8, 5).mean(-1)
    assert (found.layers, found.step_S.tolist()) == ([1, 2, 3, 4], list(range(0, 40, 5)))
    np.testing.assert_allclose(found.imbalance_LS, expected, rtol=1e-6)


def test_loads_grow_with_their_file_and_a_torn_line_waits(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts(*map(expert_record, range(3)))
    loads = ExpertLoads(run.path)
    loads.refresh()
    with (run.path / "metrics" / "1-0-experts.jsonl").open("a") as file:
        file.write('{"step": 3, "layers": [1, 2, 3, 4], "lo')
    loads.refresh()
    assert experts.steps(loads.blocks()).tolist() == [0, 1, 2]
    assert loads.problems() == []
    run.seal_experts(*map(expert_record, range(3)))
    (run.path / "metrics" / "1-0-experts.jsonl").write_text("")
    loads.refresh()
    assert experts.steps(loads.blocks()).tolist() == [0, 1, 2]
    run.append_experts(expert_record(3))
    loads.refresh()
    assert experts.steps(loads.blocks()).tolist() == [0, 1, 2, 3]


def test_a_part_that_cannot_be_read_is_named_and_the_rest_is_shown(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts(expert_record(0))
    (run.path / "metrics" / "1-0-000-experts.parquet").write_bytes(b"no")
    pq.write_table(pa.table({"step": [1]}), run.path / "metrics" / "1-0-001-experts.parquet")
    loads = ExpertLoads(run.path)
    loads.refresh()
    assert experts.steps(loads.blocks()).tolist() == [0]
    assert len(loads.problems()) == 2
    assert all("unreadable" in line for line in loads.problems())


def test_more_loads_than_fit_are_thinned_evenly_and_the_newest_stays(root: Path) -> None:
    run = RunFolder(root, "a")
    run.seal_experts(*[expert_record(step, 2, 4) for step in range(50)])
    run.append_experts(*[expert_record(step, 2, 4) for step in range(50, 102)])
    loads = ExpertLoads(run.path, most_cells=2 * 4 * 32)
    loads.refresh()
    assert experts.steps(loads.blocks()).tolist() == [*range(0, 101, 4), 101]
    held = loads.size_bytes
    run.append_experts(*[expert_record(step, 2, 4) for step in range(102, 140)])
    loads.refresh()
    kept = experts.steps(loads.blocks())
    assert kept[-1] == 139 and loads.size_bytes <= 2 * held
    assert len(set(np.diff(kept[:-1]).tolist())) <= 2, "even, but for the newest"


def test_dead_and_starved_experts_are_named_from_the_newest_steps_only(root: Path) -> None:
    run = RunFolder(root, "a")
    early = {"step": 0, "layers": [2, 7], "load": [[0, 9, 9, 9], [9, 9, 9, 9]]}
    late = [
        {"step": step, "layers": [2, 7], "load": [[5, 5, 5, 5], [100, 100, 0, 1]]}
        for step in range(1, 6)
    ]
    run.append_experts(early, *late)
    looked_at, found = experts.idle_experts(opened(run), last=5)
    assert looked_at == 5
    assert found == [experts.Idle(layer=7, dead=[2], starved=[3])]


def test_an_expert_that_got_a_token_lately_is_not_dead(root: Path) -> None:
    run = RunFolder(root, "a")
    loads = [[9, 0], [9, 9], [9, 0]]
    run.append_experts(*[{"step": s, "layers": [0], "load": [row]} for s, row in enumerate(loads)])
    assert experts.idle_experts(opened(run)) == (3, [])


def test_a_step_without_tokens_has_no_share(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts({"step": 0, "layers": [0], "load": [[0, 0]]})
    data = opened(run)
    found = experts.loads_at(data)
    assert found is not None and np.isnan(found.load_LE).all()
    assert experts.idle_experts(data) == (1, [])


def test_rows_without_layer_numbers_count_from_zero(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts({"step": 0, "load": [[1, 3], [2, 2]]})
    data = opened(run)
    assert experts.layers(data) == [0, 1]
    assert experts.load_map(data, 0).load_ES[:, 0].tolist() == [0.5, 1.5]


def test_a_row_of_another_width_is_left_out(root: Path) -> None:
    run = RunFolder(root, "a")
    rows = [{"step": step, "layers": [0], "load": [[1, 3]]} for step in range(3)]
    run.append_experts(*rows, {"step": 3, "layers": [0], "load": [[1, 2, 3]]})
    loads = ExpertLoads(run.path)
    loads.refresh()
    assert loads.problems() == ["1-0-experts.jsonl: 1 unreadable row skipped"]
    assert experts.load_map(loads.blocks(), 0).step_S.tolist() == [0, 1, 2]


def test_layers_may_differ_in_width(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts({"step": 0, "layers": [0, 1], "load": [[1, 3], [1, 1, 1]]})
    found = experts.loads_at(opened(run))
    assert found is not None
    np.testing.assert_array_equal(found.load_LE, [[0.5, 1.5, np.nan], [1.0, 1.0, 1.0]])


def test_a_run_without_experts_has_empty_answers(root: Path) -> None:
    blocks = opened(RunFolder(root, "a"))
    assert experts.layers(blocks) == []
    assert experts.loads_at(blocks) is None
    assert experts.idle_experts(blocks) == (0, [])
    assert len(experts.load_map(blocks, 0).step_S) == 0


@pytest.mark.parametrize("sealed", [False, True])
def test_the_bias_is_that_of_the_step_and_of_the_latest_attempt(root: Path, sealed: bool) -> None:
    run = RunFolder(root, "a")
    write = run.seal_experts if sealed else run.append_experts

    def made(step: int, scale: float) -> dict[str, Any]:
        bias = [[scale * (step + 1), 0.0, -0.25], [0.5, 0.0]]
        return {"step": step, "layers": [4, 2], "load": [[1, 2, 3], [4, 5]], "bias": bias}

    write(*[made(step, 1.0) for step in range(20)])
    write(*[made(step, 7.0) for step in range(12, 15)], attempt=2)
    loads = ExpertLoads(run.path)
    loads.refresh()
    for step, scale in ((0, 1.0), (11, 1.0), (14, 7.0)):
        found = experts.bias_at(loads, step)
        assert found is not None and found.layers == [2, 4]
        expected = [[0.5, 0.0, np.nan], [scale * (step + 1), 0.0, -0.25]]
        np.testing.assert_array_equal(found.bias_LE, expected)
    assert experts.bias_at(loads, 15) is None, "left behind by the second attempt"


def test_a_run_without_a_bias_has_no_map_of_it(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append_experts(
        expert_record(0), expert_record(1) | {"bias": None}, {"step": 2, "load": [[1]]}
    )
    loads = ExpertLoads(run.path)
    loads.refresh()
    assert [experts.bias_at(loads, step) for step in range(3)] == [None] * 3
