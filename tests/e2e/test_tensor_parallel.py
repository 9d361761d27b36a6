"""Ranks that split weights, sequences and vocabulary train as one process does.

All cases run in the processes of one torchrun. Nothing divides evenly: 30 positions, 257 tokens and
hidden widths of 50 and 17 over 2 and 4 ranks. One model has latent attention, the other grouped
queries and tied embeddings.
"""

import json
import signal
from dataclasses import replace
from typing import Any

import pytest
from layout_runs import (
    TOLERANCE,
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
UNEVEN = {
    "model.heads": 4,
    "model.dense_width": 50,
    "model.moe.expert_width": 17,
    "train.seq_len": 30,
    "train.steps": STEPS,
    "train.batch_size": 8,
    "eval.every": 5,
    "eval.sequences": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "mla": {**UNEVEN, "model.attention.q_lora_rank": 10},
    "gqa": {
        **UNEVEN,
        "model.attention.kind": "gqa",
        "model.heads": 8,
        "model.attention.kv_heads": 4,
        "model.tie_embeddings": "true",
        "model.moe.shared_experts": 2,
    },
}
SPLITS = [
    *(("mla", *layout, 1) for layout in [(1, 2, 1), (1, 4, 1), (2, 2, 2), (2, 2, 4), (1, 4, 4)]),
    *(("gqa", *layout, 4) for layout in [(1, 2, 1), (2, 2, 1), (1, 4, 4)]),
]
"""Model, dp, tp, ep and micro-batches."""
SINGLE = {"mla": 1, "gqa": 4}
TERMINATED = 128 + signal.SIGTERM


def name_of(model: str, dp: int, tp: int, ep: int, micro_batches: int) -> str:
    return f"{model}-dp{dp}-tp{tp}-ep{ep}-micro{micro_batches}"


def case(model: str, dp: int, tp: int, ep: int, micro_batches: int) -> Case:
    return Case(
        name_of(model, dp, tp, ep, micro_batches),
        dp * tp,
        {
            **MODELS[model],
            "parallel.tp": tp,
            "parallel.ep": ep,
            "train.micro_batch_size": 8 // dp // micro_batches,
        },
    )


def part(number: int, dp: int, tp: int, ep: int, stop: int | None) -> Case:
    """A part of a run that goes on on another layout, stopped after so many steps."""
    whole = case("mla", dp, tp, ep, 1)
    at = None if stop is None else (dp * tp - 1, stop)
    return replace(whole, name=f"travel-{number}", run="travel", signal=at)


CASES = [
    *(case(model, 1, 1, 1, count) for model, count in SINGLE.items()),
    *(case(*split) for split in SPLITS),
    part(1, 1, 2, 1, 2),
    part(2, 2, 1, 2, 2),
    part(3, 1, 1, 1, 2),
    part(4, 1, 4, 2, 2),
    part(5, 2, 2, 4, None),
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, trained."""
    shards = make_shards(tmp_path_factory.mktemp("shards"))
    return run_cases(tmp_path_factory.mktemp("pool"), shards, CASES, processes=4)


def codes(pool: Results, name: str) -> list[object]:
    return [rank.result["code"] for rank in pool.ranks(name)]


@pytest.mark.parametrize(("model", "dp", "tp", "ep", "micro_batches"), SPLITS)
def test_any_split_trains_as_one_process_does(
    pool: Results, model: str, dp: int, tp: int, ep: int, micro_batches: int
) -> None:
    single = name_of(model, 1, 1, 1, SINGLE[model])
    name = name_of(model, dp, tp, ep, micro_batches)
    assert codes(pool, name) == [0] * (dp * tp)
    want, got = metrics(pool.run(single)), metrics(pool.run(name))
    assert_near(got, want, STEPS)
    assert sum(row["grad_norm"] > 1.0 for row in want.values()) >= STEPS // 2, "clipping is active"
    for step in (STEPS // 2, STEPS):
        assert got[step]["loss/validation"] == pytest.approx(
            want[step]["loss/validation"], rel=TOLERANCE
        )
    steps = pool.ranks(single)[0].result["steps"]
    first, *others = (rank.result["steps"] for rank in pool.ranks(name))
    assert all(other == first for other in others), "every rank reports the same numbers"
    for mine, its in zip(first, steps, strict=True):
        # No choice flips (see the seed), so loads are the same counts and biases the same bits.
        assert mine["load"] == its["load"]
        assert mine["bias"] == its["bias"]
    assert_near_state(saved(pool.run(name), STEPS), saved(pool.run(single), STEPS))
    record, its_record = (
        json.loads((pool.run(n) / "run.json").read_text()) for n in (name, single)
    )
    assert record["parameters"] == its_record["parameters"]


def test_a_checkpoint_holds_each_part_once_and_every_rank_writes_what_it_alone_has(
    pool: Results,
) -> None:
    folder = pool.run(name_of("mla", 2, 2, 2, 1)) / "checkpoints" / f"step-{STEPS:08d}"
    places = json.loads((folder / "meta.json").read_text())["tensors"]
    files = [f"rank-{rank:05d}.safetensors" for rank in range(2)]
    up = places["optimizer.exp_avg.layers.0.mlp.up.weight"]
    assert up == {
        "shape": [50, 32],
        "dtype": "float32",
        "pieces": [
            {"file": files[0], "start": [0, 0], "shape": [25, 32]},
            {"file": files[1], "start": [25, 0], "shape": [25, 32]},
        ],
    }
    vocabulary = [piece["shape"] for piece in places["model.embedding.weight"]["pieces"]]
    assert vocabulary == [[129, 32], [128, 32]]
    assert places["model.layers.0.attention_norm.weight"]["file"] == files[0]
    assert places["model.layers.1.moe.experts.7.down"]["file"] == files[1]


def test_a_run_goes_on_however_its_weights_were_split(pool: Results) -> None:
    parts = [f"travel-{number}" for number in range(1, 6)]
    ends = [set(codes(pool, part)) for part in parts]
    assert ends == [{TERMINATED}, {TERMINATED}, {TERMINATED}, {TERMINATED}, {0}]
    record = json.loads((pool.run("travel-1") / "run.json").read_text())
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 2, 4, 6, 8]
    single = pool.run(name_of("mla", 1, 1, 1, 1))
    assert_near(metrics(pool.run("travel-1")), metrics(single), STEPS)
    assert_near_state(saved(pool.run("travel-1"), STEPS), saved(single, STEPS))
