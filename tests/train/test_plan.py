"""A dry run's figures against what real layers keep, real models hold, and counts by hand."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nmoe_train.cli import app
from nmoe_train.config import Config
from nmoe_train.config.load import load_config
from nmoe_train.model import Transformer
from nmoe_train.model.attention import document_mask
from nmoe_train.model.costs import count_weights
from nmoe_train.model.rope import rotary_table
from nmoe_train.parallel import Layout
from nmoe_train.plan import check_groups, dry_run, planned_vocabulary
from nmoe_train.plan.footprint import CountingTensor, head_footprint, layer_footprint
from nmoe_train.plan.report import spans
from torch import Tensor
from typer.testing import CliRunner

Tiny = Callable[..., Config]
ROOT = Path(__file__).parents[2]
VOCABULARY = 257
# Attention that torch computes on a CPU by a fused kernel, as a GPU does all of it.
GQA = {"model.attention.kind": "gqa"}


def kept(forward: Callable[[], Tensor], known: list[Tensor]) -> int:
    """Bytes that autograd keeps of a real forward pass."""
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    for tensor in known:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_keeps_what_is_foreseen(
    tiny: Tiny, build: Callable[..., Transformer], number: int, dtype: str
) -> None:
    config = tiny(**GQA, **{"precision.dtype": dtype, "model.moe.shared_experts": 2})
    real = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    layer = build(config, real).layers[number]
    foreseen = layer_footprint(config, number, CountingTensor(), CountingTensor())
    for sequences in (1, 3):
        x = torch.randn(sequences, 16, 32, requires_grad=True, dtype=torch.float32).to(real)
        table = rotary_table(16, 16, 1e4, torch.device("cpu"))
        mask = document_mask(torch.zeros(sequences, 16, dtype=torch.int64))
        known = [*layer.parameters(), table, mask]
        bytes = kept(lambda x=x, t=table, m=mask: layer(x, t, m)[0], known)
        assert foreseen.per_sequence * sequences + foreseen.fixed == pytest.approx(bytes, rel=0.02)


def test_the_head_keeps_what_is_foreseen(tiny: Tiny, build: Callable[..., Transformer]) -> None:
    config = tiny()
    model = build(config)
    norm = model.norm
    assert norm is not None
    foreseen = head_footprint(config, VOCABULARY, CountingTensor())
    x = torch.randn(3, 16, 32, requires_grad=True)
    targets = torch.zeros(3, 16, dtype=torch.int64)
    bytes = kept(lambda: model.loss(norm(x), targets, 7), [*model.parameters()])
    assert foreseen.per_sequence * 3 + foreseen.fixed == pytest.approx(bytes, rel=0.02)


def test_tensor_parallel_ranks_send_what_a_count_by_hand_says(tiny: Tiny) -> None:
    config = tiny(**GQA)
    sent = layer_footprint(config, 0, CountingTensor(2), CountingTensor()).sent
    # Attention and MLP each gather 8 of 16 positions, and send half of their sums on.
    assert sent == 2 * (8 * 32 * 4 + 16 * 32 * 4 // 2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(pp=4), Layout(dp=2, pp=2, ep=2), Layout(dp=2, tp=2, ep=4)]
)
def test_stages_hold_the_whole_model_together(tiny: Tiny, layout: Layout, tied: bool) -> None:
    config = tiny(**{"model.layers": 5, "model.tie_embeddings": tied})
    report = dry_run(config, layout, VOCABULARY)
    held = sum(
        stage.weights.experts * layout.ep + stage.weights.whole + stage.weights.cut * layout.tp
        for stage in report.stages
    )
    # A tied embedding is on the first stage and on the last. 257 rows over 2 ranks are 129 here.
    extra = 257 * 32 if tied and layout.pp > 1 else 0
    uneven = 32 * (1 if tied else 2) if layout.tp > 1 else 0
    assert held == count_weights(config.model, VOCABULARY) + extra + uneven
    assert [n for stage in report.stages for n in stage.layers] == list(range(5))


def test_a_stage_keeps_as_many_micro_batches_as_its_schedule_holds(tiny: Tiny) -> None:
    common = {
        "model.layers": 4,
        "train.batch_size": 8,
        "train.micro_batch_size": 1,
        "train.recompute": "layer",
    }
    # A layer keeps its inputs, of 16 positions of width 32; the mask is 16 x 16.
    micro_batch = 16 * 32 * 4 + 16 * 16
    for schedule, first in (("1f1b", [4, 3, 2]), ("zero-bubble", [4, 4, 4])):
        config = tiny(**common, **{"parallel.pipeline.schedule": schedule})
        report = dry_run(config, Layout(pp=4), VOCABULARY)
        assert [stage.in_flight for stage in report.stages][:3] == first
        assert [stage.memory["activations"] for stage in report.stages][:3] == [
            count * micro_batch for count in first
        ]
    assert 0 < report.bubble < 1


def test_memory_and_messages_follow_from_the_weights(tiny: Tiny) -> None:
    config = tiny(**{"train.batch_size": 8, "train.micro_batch_size": 2, "model.layers": 4})
    (stage,) = dry_run(config, Layout(dp=2), VOCABULARY).stages
    weights = count_weights(config.model, VOCABULARY)
    assert [stage.memory[k] for k in ("weights", "gradients", "moments")] == [
        4 * weights,
        4 * weights,
        8 * weights,
    ]
    assert stage.sent == {"gradients": 4 * weights}, "an all-reduce of two sends each number once"
    first, last = dry_run(config, Layout(pp=2), VOCABULARY).stages
    assert first.sent == last.sent == {"pipeline": 4 * 2 * 16 * 32 * 4}
    sharded = config.model_copy(update={"parallel": config.parallel.model_copy(update={"fsdp": 1})})
    (stage,) = dry_run(sharded, Layout(dp=2), VOCABULARY).stages
    assert stage.memory["moments"] == pytest.approx(4 * weights, rel=0.02)
    assert stage.memory["gathered"] > 0


def test_muon_keeps_one_moment_of_hidden_weights_and_sends_half_of_all_that_is_held_twice(
    tiny: Tiny,
) -> None:
    options = {"train.batch_size": 8}
    config = tiny(**options, **{"optimizer.name": "muon"})
    (adamw,), (muon,) = (
        dry_run(c, Layout(dp=2), VOCABULARY).stages for c in (tiny(**options), config)
    )
    # Embedding, output projection, norms and the router of one layer keep two.
    rest = 2 * 257 * 32 + 4 * 32 + 32 + 2 * 12 + 4 * 32
    hidden = count_weights(config.model, VOCABULARY) - rest
    assert adamw.memory["moments"] - muon.memory["moments"] == 4 * hidden
    # The results of what it owns.
    assert muon.sent["matrices"] == 4 * hidden // 2
    assert "matrices" not in adamw.sent


def test_matrices_that_tensor_parallel_ranks_cut_are_put_together(tiny: Tiny) -> None:
    config = tiny(**{"optimizer.name": "muon", "model.dense_layers": 2})
    (stage,) = dry_run(config, Layout(tp=2), VOCABULARY).stages
    # Halves of gate, up and down go to their owner and back; heads are whole; of the projections to
    # latents each rank makes every second and sends it.
    mlp, latents = 2 * 3 * 48 * 32, 2 * 16 * 32
    assert stage.sent["matrices"] == 4 * (2 * mlp // 4 + latents // 2)


def test_experts_get_a_row_for_each_token_that_chose_one_of_them(tiny: Tiny) -> None:
    config = tiny(**{"model.moe.experts": 8, "train.batch_size": 4})
    (stage,) = dry_run(config, Layout(dp=4, ep=4), VOCABULARY).stages
    # Of 28 pairs of experts 15 leave out the two of a rank; three ranks of four are others. Rows go
    # there and back, forward and backward.
    assert stage.sent["experts"] == pytest.approx(4 * 16 * 4 * (13 / 28) * 32 * 4 * 3 / 4)
    one, four = (dry_run(config, layout, VOCABULARY) for layout in (Layout(), Layout(dp=4, ep=4)))
    assert four.stages[0].weights.experts * 4 == one.stages[0].weights.experts


def test_neighbours_that_split_experts_hold_parts_and_gather_tokens(tiny: Tiny) -> None:
    config = tiny(**{"train.batch_size": 4})
    one, two = (dry_run(config, Layout(tp=2, etp=n), VOCABULARY).stages[0] for n in (1, 2))
    assert one.weights.experts == 2 * two.weights.experts
    assert one.weights.cut == two.weights.cut
    # Forward and backward, each gathers and gives away 8 of 16 positions of 4 sequences, in fp32;
    # beside the states go the two choices of a token, of 4 and, forward only, of 8 bytes.
    states = 2 * 8 * 4 * 32 * 4
    assert two.sent["tensor"] - one.sent["tensor"] == pytest.approx(2 * states, rel=0.1)
    assert check_groups(Layout(dp=2, tp=4, ep=2, etp=2))["expert_tensor"] == 2


def test_groups_of_thousands_of_ranks_are_made_in_one_process() -> None:
    assert check_groups(Layout(dp=32, tp=4, pp=16, ep=64)) == {
        "pipeline": 16,
        "data": 32,
        "tensor": 4,
        "replicas": 2,
        "expert": 64,
        "stage": 128,
    }
    assert check_groups(Layout()) == {}


def test_the_vocabulary_is_that_of_the_data_or_of_the_tokenizer_to_be_made(
    tiny: Tiny, tmp_path: Path
) -> None:
    assert planned_vocabulary(tiny()) == VOCABULARY
    assert planned_vocabulary(tiny(**{"model.vocab_size": 300})) == 300
    assert planned_vocabulary(tiny(**{"data.dir": str(tmp_path)})) == 4096


def test_a_bucket_of_gradients_is_as_large_as_the_largest_of_them_at_least(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    weights = count_weights(config.model, VOCABULARY)
    experts = 4 * 3 * 32 * 16
    # Experts have replicas of their own, and travel apart.
    for numbers, travel in ((1 << 24, weights - experts), (1000, VOCABULARY * 32)):
        monkeypatch.setattr("nmoe_train.plan.weights.BUCKET_NUMBERS", numbers)
        (stage,) = dry_run(config, Layout(dp=2), VOCABULARY).stages
        # Weights, gradients and two moments stay.
        assert stage.update - 16 * weights == 4 * travel
    (alone,) = dry_run(config, Layout(), VOCABULARY).stages
    assert alone.update == 16 * weights
    assert alone.total == sum(alone.memory.values()) > alone.update


@pytest.mark.slow
def test_deepseek_v3_is_planned_for_2048_ranks() -> None:
    path = ROOT / "apps" / "dsv3" / "config.toml"
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 0, result.output
    assert "2,048 ranks: dp=128 pp=16 ep=64, weights sharded over replicas; 120 micro-batches" in (
        result.output
    )
    assert "carried out without deadlock" in result.output
    rows = re.findall(r"│ (\d+) +│ (\d+)-(\d+) ", result.output)
    assert [int(row[0]) for row in rows] == [*range(16)] * 2
    # As its authors count (section 4.2), without the layers for predicting further tokens.
    assert count_weights(load_config(path, []).model, 129280) == pytest.approx(671e9, rel=0.001)


def test_a_layout_that_cannot_be_is_refused_before_it_is_planned(
    tmp_path: Path, tiny_tree: Callable[..., dict[str, Any]]
) -> None:
    path = ROOT / "apps" / "quickstart" / "config.toml"
    result = CliRunner().invoke(app, ["plan", str(path), "--ranks", "6"])
    assert getattr(result.exception, "code", "") == "E-LAYOUT"


def test_spans_are_runs_of_numbers() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert spans(range(4)) == "0-3"
