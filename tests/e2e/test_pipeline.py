"""Stages of a pipeline train as one process does: schedules, uneven splits, tied embeddings.

All cases run in the processes of one torchrun. Batches hold 8 sequences: 4 micro-batches of two on
one share, or of one on two shares.
"""

import json
import re
from typing import Any

import pytest
import torch
from layout_runs import (
    CURVES,
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
    "model.layers": 5,
    "train.steps": STEPS,
    "train.batch_size": 8,
    "train.micro_batch_size": 2,
    "eval.every": 5,
    "eval.sequences": 10,
    "checkpoint.every": 5,
}
TIED = {"model.tie_embeddings": "true"}
ZERO_BUBBLE = {"parallel.pipeline.schedule": "zero-bubble"}
INTERLEAVED = {"parallel.pipeline.schedule": "interleaved", "parallel.pipeline.chunks": 2}
# Name, model, processes, and what the layout sets beside the model.
LAYOUTS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("pp2", "untied", 2, {"parallel.pp": 2}),
    ("pp2-whole-share", "untied", 2, {"parallel.pp": 2, "train.micro_batch_size": 8}),
    ("pp2-recomputed", "untied", 2, {"parallel.pp": 2, "train.recompute": "layer", **ZERO_BUBBLE}),
    ("pp2-interleaved", "tied", 2, {"parallel.pp": 2, **INTERLEAVED}),
    ("pp2-tied", "tied", 2, {"parallel.pp": 2}),
    ("pp4", "untied", 4, {"parallel.pp": 4}),
    ("pp4-given", "untied", 4, {"parallel.pp": 4, "parallel.pipeline.split": "[2,1,1,1]"}),
    ("pp4-tied-zero", "tied", 4, {"parallel.pp": 4, **ZERO_BUBBLE}),
    ("pp2dp2", "tied", 4, {"parallel.pp": 2, "train.micro_batch_size": 1}),
    (
        "pp2dp2-sharded",
        "tied",
        4,
        {"parallel.pp": 2, "parallel.fsdp": "true", "train.micro_batch_size": 1, **INTERLEAVED},
    ),
    (
        "pp2tp2ep2",
        "tied",
        4,
        {"parallel.pp": 2, "parallel.tp": 2, "parallel.ep": 2, **ZERO_BUBBLE},
    ),
    (
        "pp2dp2ep2",
        "untied",
        4,
        {"parallel.pp": 2, "parallel.ep": 2, "train.micro_batch_size": 1, **ZERO_BUBBLE},
    ),
    (
        "pp2dp2ep2-interleaved",
        "untied",
        4,
        {"parallel.pp": 2, "parallel.ep": 2, "train.micro_batch_size": 1, **INTERLEAVED},
    ),
]
MODELS = {"untied": COMMON, "tied": {**COMMON, **TIED}}
TERMINATED = 128 + 15

CASES = [
    *(Case(model, 1, sets) for model, sets in MODELS.items()),
    *(Case(name, n, {**MODELS[model], **sets}) for name, model, n, sets in LAYOUTS),
    Case("travel-1", 2, {**MODELS["tied"], "parallel.pp": 2}, run="travel", signal=(1, 3)),
    Case("travel-2", 1, MODELS["tied"], run="travel", signal=(0, 3)),
    Case("travel-3", 4, {**MODELS["tied"], "parallel.pp": 4, **ZERO_BUBBLE}, run="travel"),
    Case("stopped", 2, {**COMMON, "parallel.pp": 2}, run="same", signal=(1, 4)),
    Case("resumed", 2, {**COMMON, "parallel.pp": 2}, run="same"),
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, trained."""
    shards = make_shards(tmp_path_factory.mktemp("shards"))
    return run_cases(tmp_path_factory.mktemp("pool"), shards, CASES, processes=4)


def codes(pool: Results, name: str) -> list[object]:
    return [rank.result["code"] for rank in pool.ranks(name)]


@pytest.mark.parametrize(("name", "model"), [(name, model) for name, model, *_ in LAYOUTS])
def test_any_pipeline_trains_as_one_process_does(pool: Results, name: str, model: str) -> None:
    assert codes(pool, name) == [0] * pool.cases[name].processes
    want, got = metrics(pool.run(model)), metrics(pool.run(name))
    assert_near(got, want, STEPS)
    for step in (STEPS // 2, STEPS):
        assert got[step]["loss/validation"] == pytest.approx(
            want[step]["loss/validation"], rel=1e-5
        )
    steps = pool.ranks(model)[0].result["steps"]
    first, *others = (rank.result["steps"] for rank in pool.ranks(name))
    assert all(other == first for other in others), "ranks report the same numbers"
    for mine, its in zip(first, steps, strict=True):
        assert mine["load"] == its["load"]
        assert mine["bias"] == its["bias"]
        assert mine.keys() == its.keys()
    assert_near_state(saved(pool.run(name), STEPS), saved(pool.run(model), STEPS))


def test_weights_start_the_same_on_any_stage_and_the_tied_ones_stay_so(pool: Results) -> None:
    for name, model, processes, sets in LAYOUTS:
        if "parallel.tp" not in sets:
            everything = pool.ranks(model)[0].weights("initial")
            found = [rank.weights("initial") for rank in pool.ranks(name)]
            assert set().union(*found) == everything.keys()
            for weights in found:
                assert all(torch.equal(weights[key], everything[key]) for key in weights)
        if model == "tied":
            last = processes - processes // sets["parallel.pp"]
            ends = [pool.ranks(name)[rank].weights("final") for rank in (0, last)]
            assert torch.equal(*(weights["model.embedding.weight"] for weights in ends))


def layers_of(pool: Results, name: str) -> list[list[int]]:
    """Numbers of the layers that each rank of a case holds."""
    held = []
    for rank in pool.ranks(name):
        names = " ".join(rank.weights("initial"))
        held.append(sorted({int(number) for number in re.findall(r"layers\.(\d+)\.", names)}))
    return held


def test_layers_are_spread_by_cost_or_as_given(pool: Results) -> None:
    assert layers_of(pool, "pp4-given") == [[0, 1], [2], [3], [4]]
    assert layers_of(pool, "pp2-interleaved") in ([[0, 2, 3], [1, 4]], [[0, 1, 3], [2, 4]])
    # The output projection costs as much as a layer and a half.
    assert layers_of(pool, "pp2dp2") == [[0, 1, 2]] * 2 + [[3, 4]] * 2


def test_the_run_reports_the_whole_model_and_the_wait_for_neighbours(pool: Results) -> None:
    for name, model, *_ in LAYOUTS:
        record, single = (json.loads((pool.run(n) / "run.json").read_text()) for n in (name, model))
        assert record["parameters"] == single["parameters"]
        for rank in range(pool.cases[name].processes):
            for row in metrics(pool.run(name), rank).values():
                assert row["time_ms/bubble"] > 0
                assert ("time_ms/weights" in row) == ("zero" in json.dumps(pool.cases[name].sets))
    texts = [pool.ranks(name)[0].output for name in ("untied", "pp2", "pp4")]
    (written,) = {re.findall(r"continued by the model: .*", text)[0] for text in texts}
    assert len(written) > 25


def test_a_run_goes_on_from_two_stages_on_one_and_on_four(pool: Results) -> None:
    assert codes(pool, "travel-1") == [TERMINATED] * 2
    assert codes(pool, "travel-2") == [TERMINATED]
    assert codes(pool, "travel-3") == [0] * 4
    record = json.loads((pool.run("travel-1") / "run.json").read_text())
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 3, 6]
    assert_near(metrics(pool.run("travel-1")), metrics(pool.run("tied")), STEPS)
    assert_near_state(saved(pool.run("travel-1"), STEPS), saved(pool.run("tied"), STEPS))


def test_on_the_same_stages_a_stopped_run_ends_with_the_bits_of_one_never_stopped(
    pool: Results,
) -> None:
    assert codes(pool, "stopped") == [TERMINATED] * 2
    assert codes(pool, "resumed") == [0] * 2
    want, got = metrics(pool.run("pp2")), metrics(pool.run("resumed"))
    for step in want:
        assert [got[step][name] for name in CURVES] == [want[step][name] for name in CURVES]
    want_state, got_state = (saved(pool.run(name), STEPS) for name in ("pp2", "resumed"))
    assert all(torch.equal(got_state[name], want_state[name]) for name in want_state)
