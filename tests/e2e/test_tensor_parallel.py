"""Ranks that split or shard weights, sequences and vocabulary train as one process does.

All cases run in the processes of one torchrun. Nothing divides evenly: 30 positions, 257 tokens and
hidden widths of 50 and 17 over 2 and 4 ranks. One model has latent attention, the other grouped
queries and tied embeddings.
"""

import json
import signal
from dataclasses import replace
from typing import Any

import pytest
from commands import checkpoint_hashes
from layout_runs import (
    CURVES,
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
MICRO_BATCHES = {"mla": 1, "gqa": 4}
SPLITS = [
    *(
        ("mla", *layout, False)
        for layout in [(1, 2, 1), (1, 4, 1), (2, 2, 2), (2, 2, 4), (1, 4, 4)]
    ),
    *(("gqa", *layout, False) for layout in [(1, 2, 1), (2, 2, 1), (1, 4, 4)]),
    *(("mla", *layout, True) for layout in [(4, 1, 2), (1, 4, 2), (2, 2, 1)]),
    *(("gqa", *layout, True) for layout in [(2, 2, 4)]),
]
"""Model, dp, tp, ep, and whether replicas shard the weights."""
TERMINATED = 128 + signal.SIGTERM


def name_of(model: str, dp: int, tp: int, ep: int, fsdp: bool = False) -> str:
    return f"{model}-dp{dp}-tp{tp}-ep{ep}{'-fsdp' if fsdp else ''}"


def case(model: str, dp: int, tp: int, ep: int, fsdp: bool = False) -> Case:
    return Case(
        name_of(model, dp, tp, ep, fsdp),
        dp * tp,
        {
            **MODELS[model],
            "parallel.tp": tp,
            "parallel.ep": ep,
            "parallel.fsdp": str(fsdp).lower(),
            "train.micro_batch_size": 8 // dp // MICRO_BATCHES[model],
        },
    )


def part(number: int, dp: int, tp: int, ep: int, stop: int | None, fsdp: bool = False) -> Case:
    """A part of a run that goes on on another layout, stopped after so many steps."""
    whole = case("mla", dp, tp, ep, fsdp)
    at = None if stop is None else (dp * tp - 1, stop)
    return replace(whole, name=f"travel-{number}", run="travel", signal=at)


CASES = [
    *(case(model, 1, 1, 1) for model in MODELS),
    *(case(*split) for split in SPLITS),
    part(1, 1, 2, 1, 2),
    part(2, 2, 1, 2, 2),
    part(3, 2, 2, 1, 2, fsdp=True),
    part(4, 1, 1, 1, 2),
    part(5, 2, 2, 4, None, fsdp=True),
    *(
        replace(case("mla", 1, 4, 2, True), name=name, run="same", signal=stop)
        for name, stop in (("stopped", (3, 4)), ("resumed", None))
    ),
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, trained."""
    shards = make_shards(tmp_path_factory.mktemp("shards"))
    return run_cases(tmp_path_factory.mktemp("pool"), shards, CASES, processes=4)


def codes(pool: Results, name: str) -> list[object]:
    return [rank.result["code"] for rank in pool.ranks(name)]


@pytest.mark.parametrize(("model", "dp", "tp", "ep", "fsdp"), SPLITS)
def test_any_split_trains_as_one_process_does(
    pool: Results, model: str, dp: int, tp: int, ep: int, fsdp: bool
) -> None:
    single = name_of(model, 1, 1, 1)
    name = name_of(model, dp, tp, ep, fsdp)
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
    folder = pool.run(name_of("mla", 2, 2, 2)) / "checkpoints" / f"step-{STEPS:08d}"
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


def test_sharded_ranks_each_write_their_own_part(pool: Results) -> None:
    folder = pool.run(name_of("mla", 2, 2, 1, fsdp=True)) / "checkpoints" / f"step-{STEPS:08d}"
    places = json.loads((folder / "meta.json").read_text())["tensors"]
    # Rows over tensor-parallel ranks first, then over replicas: ranks 0 and 2, 1 and 3.
    starts = {p["file"]: p["start"][0] for p in places["model.layers.0.mlp.up.weight"]["pieces"]}
    assert starts == {f"rank-{r:05d}.safetensors": row for r, row in enumerate([0, 25, 13, 38])}
    # What tensor-parallel ranks have alike, the first of them writes.
    down = places["model.layers.1.attention.kv_down.weight"]["pieces"]
    assert [piece["file"] for piece in down] == [f"rank-{r:05d}.safetensors" for r in (0, 2)]
    owners = [places[f"model.layers.1.moe.experts.{n}.down"]["file"] for n in range(8)]
    assert owners == [f"rank-{n // 2:05d}.safetensors" for n in range(8)]


def test_a_run_goes_on_however_its_weights_were_split(pool: Results) -> None:
    parts = [f"travel-{number}" for number in range(1, 6)]
    ends = [set(codes(pool, part)) for part in parts]
    assert ends == [{TERMINATED}, {TERMINATED}, {TERMINATED}, {TERMINATED}, {0}]
    record = json.loads((pool.run("travel-1") / "run.json").read_text())
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 2, 4, 6, 8]
    single = pool.run(name_of("mla", 1, 1, 1))
    assert_near(metrics(pool.run("travel-1")), metrics(single), STEPS)
    assert_near_state(saved(pool.run("travel-1"), STEPS), saved(single, STEPS))


def test_split_and_sharded_a_stopped_run_ends_with_the_bits_of_one_never_stopped(
    pool: Results,
) -> None:
    whole = name_of("mla", 1, 4, 2, fsdp=True)
    assert [set(codes(pool, name)) for name in ("stopped", "resumed")] == [{TERMINATED}, {0}]
    want, got = metrics(pool.run(whole)), metrics(pool.run("resumed"))
    assert [[row[n] for n in CURVES] for row in got.values()] == [
        [row[n] for n in CURVES] for row in want.values()
    ]
    assert checkpoint_hashes(pool.run("resumed")) == checkpoint_hashes(pool.run(whole))
