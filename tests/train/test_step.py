"""One optimizer step: accumulation, losses, clipping, rates, formats, and gradients not finite."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nmoe_data.loader import Batch, Loader
from nmoe_kernels.router import sequence_balance_loss, z_loss
from nmoe_train.config import Config
from nmoe_train.data import TrainingData, to_step
from nmoe_train.errors import TrainError
from nmoe_train.loop import Outcome
from nmoe_train.model import Transformer
from nmoe_train.model.loss import IGNORED
from nmoe_train.model.moe_block import router_bias
from nmoe_train.optim import build_optimizer, clip_gradients
from nmoe_train.step import StepResult, train_step
from nmoe_train.telemetry.timers import StageTimer
from torch import Tensor, nn

CPU = torch.device("cpu")
Build = Callable[..., Transformer]
Tiny = Callable[..., Config]


class Training:
    """A model and its optimizer, stepped by hand."""

    def __init__(self, config: Config, model: Transformer, data: TrainingData) -> None:
        self.config, self.model = config, model
        self.optimizer = build_optimizer(model, config.optimizer)
        self.loader = Loader(data.train, seq_len=config.train.seq_len, seed=0)
        self.done = 0

    def batch(self, step: int) -> Batch:
        return self.loader.batch(step, self.config.train.batch_size)

    def step(self, number: int | None = None) -> StepResult:
        share = to_step(self.batch(self.done if number is None else number))
        self.done += 1
        tokens = self.done * self.config.tokens_per_step
        timer = StageTimer(CPU)
        return train_step(self.model, self.optimizer, share, self.config, tokens, timer)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def moments(self) -> list[Tensor]:
        return [
            tensor.clone()
            for parameter in self.model.parameters()
            for _, tensor in sorted(self.optimizer.state[parameter].items())
        ]


@pytest.fixture
def start(tiny: Tiny, build: Build, data: TrainingData) -> Callable[..., Training]:
    def make(dtype: torch.dtype = torch.float32, **overrides: Any) -> Training:
        config = tiny(**overrides)
        return Training(config, build(config, dtype), data)

    return make


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> bool:
    difference = float((got - want).double().norm())
    return difference <= tolerance * max(float(want.double().norm()), 1e-8)


LOUD = {"model.moe.balance_loss": 0.5, "model.moe.z_loss": 0.1, "train.batch_size": 4}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_accumulation_changes_nothing(start: Callable[..., Training], size: int) -> None:
    whole = start(**LOUD)
    parts = start(**LOUD, **{"train.micro_batch_size": size})
    # The router's choices flip only at exact ties, so three steps stay together.
    for _ in range(3):
        want, got = whole.step(), parts.step()
        assert want.scalars.keys() == got.scalars.keys()
        for name, value in want.scalars.items():
            assert close(got.scalars[name], value), name
        assert torch.equal(got.loads[1], want.loads[1])
        assert got.rates == want.rates
    changed = parts.parameters()
    for name, value in whole.parameters().items():
        # Adam divides by the root of the second moment: where that is small, rounding grows.
        assert close(changed[name], value, 1e-5), name
    assert torch.equal(
        router_bias(parts.model.moe_blocks()[1]), router_bias(whole.model.moe_blocks()[1])
    )


@pytest.mark.parametrize("size", [1, 4])
def test_losses_are_those_of_a_plain_computation(start: Callable[..., Training], size: int) -> None:
    training = start(**LOUD, **{"train.micro_batch_size": size})
    plain = copy.deepcopy(training.model)
    result = training.step()
    step = to_step(training.batch(0))
    seen: list[Any] = []
    plain.moe_blocks()[1].experts.register_forward_hook(lambda _m, _i, out: seen.append(out[1]))
    logits = plain.logits(step.inputs_BS, step.documents_BS).double()
    ce = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), step.targets_BS.flatten(), ignore_index=IGNORED
    )
    balance = sequence_balance_loss(seen[0].scores_TE, seen[0].ids_TK, rows=4)
    z = z_loss(seen[0].logits_TE)
    total = ce + 0.5 * balance + 0.1 * z
    wanted = {"loss/ce": ce, "loss/balance": balance, "loss/z": z, "loss/train": total}
    for name, value in wanted.items():
        assert float(result.scalars[name]) == pytest.approx(value.item(), rel=1e-5), name
    total.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.parameters()))
    assert float(result.scalars["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert torch.equal(result.loads[1], seen[0].load_E)


@pytest.mark.parametrize("coefficient", ["model.moe.balance_loss", "model.moe.z_loss"])
def test_auxiliary_losses_move_the_router_and_only_with_their_coefficient(
    start: Callable[..., Training], coefficient: str
) -> None:
    quiet = {"model.moe.balance_loss": 0.0, "model.moe.z_loss": 0.0}
    plain, loud = start(**quiet), start(**(quiet | {coefficient: 1.0}))
    results = [training.step() for training in (plain, loud)]
    assert torch.equal(results[0].scalars["loss/train"], results[0].scalars["loss/ce"])
    name = coefficient.rpartition(".")[2].replace("balance_loss", "loss/balance")
    key = name if "/" in name else "loss/z"
    added = results[1].scalars["loss/train"] - results[1].scalars["loss/ce"]
    assert close(added, results[1].scalars[key], 1e-5)
    router = "layers.1.moe.experts.router.weight"
    assert not torch.equal(plain.parameters()[router], loud.parameters()[router])


def test_targets_stop_at_the_end_of_a_document(data: TrainingData) -> None:
    batch = Loader(data.train, seq_len=16, seed=0).batch(0, 64)
    step = to_step(batch)
    ends = step.inputs_BS == data.tokenizer.end_of_document_id
    assert ends.any()
    assert torch.equal(step.targets_BS == IGNORED, ends)
    kept = step.targets_BS != IGNORED
    assert torch.equal(step.targets_BS[kept], torch.from_numpy(batch.tokens)[:, 1:][kept])
    assert step.predictions == int(kept.sum())


def test_a_gradient_that_is_not_finite_skips_the_whole_update(
    start: Callable[..., Training],
) -> None:
    poisoned, spared = start(), start()
    for training in (poisoned, spared):
        training.step(0)
    before, moments = poisoned.parameters(), poisoned.moments()
    bias = router_bias(poisoned.model.moe_blocks()[1]).clone()
    norm = poisoned.model.layers[0].ffn_norm.weight
    kept = norm.detach().clone()
    norm.data[3] = math.inf
    result = poisoned.step(1)
    assert float(result.scalars["skipped"]) == 1.0
    assert not bool(result.scalars["grad_norm"].isfinite())
    norm.data.copy_(kept)
    for name, value in poisoned.parameters().items():
        assert torch.equal(value, before[name]), name
    assert all(map(torch.equal, poisoned.moments(), moments))
    assert torch.equal(router_bias(poisoned.model.moe_blocks()[1]), bias)

    spared.done += 1
    for training in (poisoned, spared):
        assert float(training.step(2).scalars["skipped"]) == 0.0
    for name, value in spared.parameters().items():
        assert torch.equal(poisoned.parameters()[name], value), name


def test_ten_steps_without_a_finite_gradient_end_the_run(
    tiny: Tiny,
    run: Callable[..., Outcome],
    events: Callable[[Path], list[dict[str, Any]]],
    rows: Callable[..., list[dict[str, Any]]],
) -> None:
    config = tiny(**{"optimizer.lr": 1e30, "train.steps": 40, "schedule.warmup": 0.0})
    with pytest.raises(TrainError) as caught:
        run(config)
    assert caught.value.code == "E-NOT-FINITE"
    assert "10 steps in a row" in str(caught.value)
    skips = [e["step"] for e in events(config.run.dir) if "update skipped" in e.get("what", "")]
    last = skips[-1]
    assert skips[-10:] == list(range(last - 9, last + 1))
    assert f"up to step {last}" in str(caught.value)
    assert events(config.run.dir)[-1]["status"] == "failed"
    assert rows(config.run.dir)[-1]["grad_norm"] in ("NaN", "Infinity")
    # The step that ended it is in the metrics and in run.json.
    assert rows(config.run.dir)[-1]["step"] == last
    assert json.loads((config.run.dir / "run.json").read_text())["step"] == last


def test_steps_that_are_skipped_now_and_then_do_not_end_the_run(
    tiny: Tiny,
    run: Callable[..., Outcome],
    poison: Callable[..., None],
    rows: Callable[..., list[dict[str, Any]]],
) -> None:
    poison({*range(1, 10), *range(11, 20)})
    config = tiny(**{"train.steps": 20})
    assert run(config).status == "completed"
    finite = [row["step"] for row in rows(config.run.dir) if math.isfinite(row["grad_norm"])]
    assert finite == [10, 20]


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_clipping_scales_all_gradients_to_the_limit() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    before = [gradient.clone() for gradient in gradients_of(model)]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in before))
    for limit, scale in ((0.0, 1.0), (norm * 2, 1.0), (norm / 4, 0.25)):
        for gradient, original in zip(gradients_of(model), before, strict=True):
            gradient.copy_(original)
        # A generator, as a model gives it.
        assert float(clip_gradients(model.parameters(), limit)) == pytest.approx(norm, rel=1e-5)
        for gradient, original in zip(gradients_of(model), before, strict=True):
            torch.testing.assert_close(gradient, original * scale, rtol=1e-5, atol=0)
    gradients_of(model)[0][0] = math.inf
    finite = [gradient.clone() for gradient in gradients_of(model)[1:]]
    assert not bool(clip_gradients(model.parameters(), 0.1).isfinite())
    assert all(map(torch.equal, gradients_of(model)[1:], finite))


def test_clipping_is_what_the_configuration_says(start: Callable[..., Training]) -> None:
    # SGD-like: with eps far above the gradient, Adam's first update is lr * gradient / eps.
    shared = {"optimizer.eps": 1e6, "optimizer.weight_decay": 0.0, "schedule.warmup": 0.0}
    shared |= {"optimizer.lr": 1e6}
    moved = []
    for limit in (0.0, 0.5):
        training = start(**shared, **{"train.clip_norm": limit})
        before = training.parameters()
        norm = float(training.step().scalars["grad_norm"])
        after = training.parameters()
        squares = sum(float((after[n] - before[n]).double().square().sum()) for n in before)
        moved.append((norm, math.sqrt(squares)))
    (norm, free), (same_norm, clipped) = moved
    assert norm == same_norm
    assert norm > 1
    assert free == pytest.approx(norm, rel=1e-3)
    assert clipped == pytest.approx(0.5, rel=1e-3)


def test_each_group_moves_by_its_own_rate(start: Callable[..., Training]) -> None:
    training = start(
        **{
            "optimizer.lr": 1e-3,
            "optimizer.lr_router": 2e-4,
            "optimizer.lr_expert": 5e-3,
            "optimizer.eps": 1e-30,
            "optimizer.weight_decay": 0.0,
            "schedule.warmup": 0.0,
        }
    )
    before = training.parameters()
    result = training.step()
    assert result.rates == {"lr/dense": 1e-3, "lr/router": 2e-4, "lr/expert": 5e-3}
    for name, value in training.parameters().items():
        # Adam's first update has the size of the rate wherever there is a gradient.
        step = float((value - before[name]).abs().max())
        wanted = 1e-3
        if name.endswith("router.weight"):
            wanted = 2e-4
        elif name.endswith((".experts.gate_up", ".experts.down")):
            wanted = 5e-3
        assert step == pytest.approx(wanted, rel=2e-2), name


def test_only_matrices_outside_routers_and_embeddings_decay(tiny: Tiny, build: Build) -> None:
    model = build(tiny())
    optimizer = build_optimizer(model, tiny(**{"optimizer.weight_decay": 0.3}).optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {
        names[id(p)]: group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert decay.keys() == dict(model.named_parameters()).keys()
    for name, value in decay.items():
        spared = "norm" in name or "embedding" in name or "router" in name
        assert value == (0.0 if spared else 0.3), name


def test_bf16_keeps_master_weights_and_moments_in_fp32(start: Callable[..., Training]) -> None:
    training = start(torch.bfloat16, **{"precision.dtype": "bf16"})
    training.step()
    for name, parameter in training.model.named_parameters():
        assert parameter.dtype == torch.float32, name
        for moment, tensor in training.optimizer.state[parameter].items():
            assert tensor.dtype == torch.float32, (name, moment)
    assert router_bias(training.model.moe_blocks()[1]).dtype == torch.float32
    hidden = training.model.hidden(*(torch.zeros(1, 4, dtype=torch.int64),) * 2).hidden_BSH
    assert hidden.dtype == torch.bfloat16


def test_updates_too_small_for_bf16_survive(start: Callable[..., Training]) -> None:
    rate = 1e-6
    training = start(
        torch.bfloat16,
        **{
            "precision.dtype": "bf16",
            "optimizer.lr": rate,
            "optimizer.eps": 1e-30,
            "schedule.warmup": 0.0,
            "schedule.decay": 0.0,
        },
    )
    for _ in range(5):
        training.step()
    norm = training.model.norm
    assert norm is not None
    weight = norm.weight.detach()
    moved = (weight - 1).abs()
    assert float(moved.min()) > 0
    assert float(moved.max()) < 6 * rate
    assert torch.equal(weight.bfloat16(), torch.ones_like(weight).bfloat16())


def test_the_balancing_bias_pushes_towards_the_mean_by_one_rate(
    start: Callable[..., Training],
) -> None:
    training = start(**{"model.moe.bias_update_rate": 0.25, "train.micro_batch_size": 1})
    result = training.step()
    load = result.loads[1]
    assert int(load.sum()) == 4 * 16 * 2
    wanted = [math.copysign(0.25, 32 - n) if n != 32 else 0.0 for n in load.tolist()]
    assert router_bias(training.model.moe_blocks()[1]).tolist() == wanted
    frozen = start(**{"model.moe.bias_update_rate": 0.0})
    frozen.step()
    assert not router_bias(frozen.model.moe_blocks()[1]).any()


def test_recomputing_layers_steps_the_same(start: Callable[..., Training]) -> None:
    plain, again = start(), start(**{"train.recompute": "layer"})
    assert again.model.recompute
    for _ in range(2):
        want, got = plain.step(), again.step()
        assert torch.equal(want.loads[1], got.loads[1])
        assert torch.equal(want.scalars["loss/train"], got.scalars["loss/train"])
        assert torch.equal(want.scalars["grad_norm"], got.scalars["grad_norm"])
    for name, value in plain.parameters().items():
        assert torch.equal(again.parameters()[name], value), name


def test_a_model_without_experts_trains(start: Callable[..., Training]) -> None:
    training = start(**{"model.dense_layers": 2})
    result = training.step()
    assert result.loads == {}
    assert torch.equal(result.scalars["loss/train"], result.scalars["loss/ce"])
