"""Checkpoints of ranks that split or shard weights: every part once, from whoever has it."""

import json
from typing import Any

import pytest
from layout_cases import STEPS, Trained

pytestmark = pytest.mark.slow


def places(trained: Trained, name: str) -> dict[str, Any]:
    """Where each tensor of a run's last checkpoint stands."""
    folder = trained.run(name) / "checkpoints" / f"step-{STEPS:08d}"
    found: dict[str, Any] = json.loads((folder / "meta.json").read_text())["tensors"]
    return found


def test_a_checkpoint_holds_each_part_once_and_every_rank_writes_what_it_alone_has(
    trained: Trained,
) -> None:
    found = places(trained, "mla-dp2-tp2-ep2")
    files = [f"rank-{rank:05d}.safetensors" for rank in range(2)]
    assert found["optimizer.exp_avg.layers.0.mlp.up.weight"] == {
        "shape": [50, 32],
        "dtype": "float32",
        "pieces": [
            {"file": files[0], "start": [0, 0], "shape": [25, 32]},
            {"file": files[1], "start": [25, 0], "shape": [25, 32]},
        ],
    }
    vocabulary = [piece["shape"] for piece in found["model.embedding.weight"]["pieces"]]
    assert vocabulary == [[129, 32], [128, 32]]
    assert found["model.layers.0.attention_norm.weight"]["file"] == files[0]
    assert found["model.layers.1.moe.experts.7.down"]["file"] == files[1]


def test_sharded_ranks_each_write_their_own_part(trained: Trained) -> None:
    found = places(trained, "mla-dp2-tp2-fsdp")
    # Rows over tensor-parallel ranks first, then over replicas: ranks 0 and 2, 1 and 3.
    starts = {p["file"]: p["start"][0] for p in found["model.layers.0.mlp.up.weight"]["pieces"]}
    assert starts == {f"rank-{r:05d}.safetensors": row for r, row in enumerate([0, 25, 13, 38])}
    # What tensor-parallel ranks have alike, the first of them writes.
    down = found["model.layers.1.attention.kv_down.weight"]["pieces"]
    assert [piece["file"] for piece in down] == [f"rank-{r:05d}.safetensors" for r in (0, 2)]
    owners = [found[f"model.layers.1.moe.experts.{n}.down"]["file"] for n in range(8)]
    assert owners == [f"rank-{n // 2:05d}.safetensors" for n in range(8)]


def test_under_muon_a_hidden_weight_has_one_moment_and_the_others_two(trained: Trained) -> None:
    for name in ("muon", "muon-dp2-tp2-pp2-ep4"):
        moments: dict[str, set[str]] = {}
        for tensor in places(trained, name):
            if tensor.startswith("optimizer."):
                _, moment, weight = tensor.split(".", 2)
                moments.setdefault(weight, set()).add(moment)
        for weight, kept in moments.items():
            adamw = "norm" in weight or ".router." in weight or weight.startswith(("emb", "head"))
            assert kept == ({"exp_avg", "exp_avg_sq"} if adamw else {"momentum_buffer"}), weight
