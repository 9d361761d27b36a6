"""Data, tensor, pipeline and expert parallelism in one run of eight processes train as one does."""

from typing import Any

import pytest
from layout_runs import (
    Case,
    Results,
    assert_near,
    assert_near_state,
    make_shards,
    metrics,
    run_cases,
    saved,
)

pytestmark = pytest.mark.slow

STEPS = 10
COMMON: dict[str, Any] = {
    "model.heads": 4,
    "model.layers": 4,
    "train.steps": STEPS,
    "train.batch_size": 8,
    "train.seq_len": 30,
    "eval.sequences": 10,
    "checkpoint.every": STEPS,
}
ALL = {"parallel.dp": 2, "parallel.tp": 2, "parallel.pp": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep1": {**ALL, "train.micro_batch_size": 1},
    "ep2": {
        **ALL,
        "parallel.ep": 2,
        "train.micro_batch_size": 1,
        "parallel.pipeline.schedule": "zero-bubble",
    },
    "ep4": {**ALL, "parallel.ep": 4},
    "ep4-sharded": {
        **ALL,
        "parallel.ep": 4,
        "parallel.fsdp": "true",
        "train.micro_batch_size": 2,
        "parallel.pipeline.schedule": "interleaved",
        "parallel.pipeline.chunks": 2,
    },
    "ep8": {"parallel.dp": 4, "parallel.tp": 2, "parallel.ep": 8},
}
CASES = [
    Case("single", 1, COMMON),
    *(Case(name, 8, {**COMMON, **sets}) for name, sets in LAYOUTS.items()),
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, trained."""
    shards = make_shards(tmp_path_factory.mktemp("shards"))
    return run_cases(tmp_path_factory.mktemp("pool"), shards, CASES, processes=8)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_of_all_dimensions_trains_as_one_process_does(pool: Results, name: str) -> None:
    assert [rank.result["code"] for rank in pool.ranks(name)] == [0] * 8
    want, got = metrics(pool.run("single")), metrics(pool.run(name))
    assert_near(got, want, STEPS)
    assert got[STEPS]["loss/validation"] == pytest.approx(want[STEPS]["loss/validation"], rel=1e-5)
    steps = pool.ranks("single")[0].result["steps"]
    first, *others = (rank.result["steps"] for rank in pool.ranks(name))
    assert all(other == first for other in others), "ranks report the same numbers"
    for mine, its in zip(first, steps, strict=True):
        assert mine["load"] == its["load"]
        assert mine["bias"] == its["bias"]
    assert_near_state(saved(pool.run(name), STEPS), saved(pool.run("single"), STEPS))
