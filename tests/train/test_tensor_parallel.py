"""Weights, sequences and vocabulary in parts: sums over ranks are what one process computes.

Three ranks, forked from this process, share what three does not divide, and more than there are
positions. Everything is compared in fp64 or fp32 with one process's numbers.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nmoe_kernels.router import count_choices, sequence_balance_loss
from nmoe_train.config import Config
from nmoe_train.errors import TrainError
from nmoe_train.model import Transformer, chunked_cross_entropy, initialise
from nmoe_train.model.loss import IGNORED
from nmoe_train.model.tensor import TensorParallel
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups
from torch import Tensor

Tiny = Callable[..., Config]
RANKS = 3
VOCABULARY = 41
Together = Callable[[Callable[[TensorParallel], Any]], list[Any]]


@pytest.fixture
def together(on_ranks: Callable[..., list[Any]]) -> Together:
    """Run a function on three processes that share what they compute; what each returned."""
    return lambda function: on_ranks(RANKS, lambda: function(TensorParallel(dist.group.WORLD)))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("positions", [7, 6, 2])
def test_positions_are_gathered_and_sums_scattered_and_each_is_the_others_backward(
    together: Together, positions: int
) -> None:
    whole = draw(2, positions, 5)
    lengths = TensorParallel().lengths(positions)
    assert lengths == [positions]

    def on_rank(tensor: TensorParallel) -> tuple[Tensor, ...]:
        cut = tensor.cut(1, positions)
        assert cut is not None
        part = cut.of(whole).clone().requires_grad_()
        gathered = tensor.gather(part, positions)
        # Every rank uses all positions in its own way, so gradients are to be summed.
        (gathered * (tensor.rank + 1)).sum().backward()
        mine = (whole * (tensor.rank + 1)).requires_grad_()
        scattered = tensor.scatter_sum(mine)
        (scattered * cut.of(whole)).sum().backward()
        assert part.grad is not None and mine.grad is not None
        return gathered.detach(), part.grad, scattered.detach(), mine.grad

    results = together(on_rank)
    factor = sum(range(1, RANKS + 1))
    for gathered, _, _, grad in results:
        assert torch.equal(gathered, whole)
        assert torch.equal(grad, whole)
    assert torch.equal(torch.cat([part for _, part, _, _ in results], 1), factor * (whole * 0 + 1))
    torch.testing.assert_close(torch.cat([r[2] for r in results], 1), factor * whole)


def test_parts_are_as_even_as_can_be_and_cover_everything() -> None:
    tensor = TensorParallel()
    for ranks in range(1, 9):
        tensor.ranks = ranks
        for whole in range(20):
            lengths = tensor.lengths(whole)
            assert (len(lengths), sum(lengths)) == (ranks, whole)
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("chunk", [4, 64])
def test_the_loss_of_a_shared_vocabulary_is_that_of_the_whole(
    together: Together, chunk: int
) -> None:
    hidden, weight = draw(11, 6).float(), draw(VOCABULARY, 6, seed=1).float()
    targets = torch.arange(11) * 3 % VOCABULARY
    targets[4] = IGNORED
    want_hidden, want_weight = (t.clone().requires_grad_() for t in (hidden, weight))
    want = F.cross_entropy(
        want_hidden @ want_weight.T, targets, reduction="sum", ignore_index=IGNORED
    )
    (want / 7).backward()

    def on_rank(tensor: TensorParallel) -> tuple[Tensor, ...]:
        cut = tensor.cut(0, VOCABULARY)
        assert cut is not None
        states, rows = hidden.clone().requires_grad_(), cut.of(weight).clone().requires_grad_()
        loss = chunked_cross_entropy(
            states, rows, targets, chunk=chunk, tensor=tensor, first=cut.start
        )
        (loss / 7).backward()
        assert states.grad is not None and rows.grad is not None
        return loss.detach(), states.grad, rows.grad

    results = together(on_rank)
    torch.testing.assert_close(sum(loss for loss, _, _ in results), want.detach())
    torch.testing.assert_close(sum(grad for _, grad, _ in results), want_hidden.grad)
    torch.testing.assert_close(torch.cat([grad for _, _, grad in results]), want_weight.grad)


def numbers(model: Transformer, inputs: Tensor, documents: Tensor, targets: Tensor) -> Any:
    """Losses of a model, its loads, and after a backward its gradients by name."""
    output = model.hidden(inputs, documents)
    reports = output.routing.values()
    balance = torch.stack([report.balance_loss for report in reports]).sum()
    z = torch.stack([report.z_loss for report in reports]).sum()
    ce = model.loss(output.hidden_BSH, targets, 8)
    (ce / 13 + 0.3 * balance + 0.2 * z).backward()
    loads = torch.stack([report.load_E for report in reports])
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.stack([ce, balance, z]).detach(), loads, grads


@pytest.mark.parametrize("positions", [7, 6, 2])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_losses_and_every_gradient_are_those_of_one_process(
    together: Together, tiny: Tiny, kind: str, positions: int
) -> None:
    config = tiny(
        **{
            "model.width": 36,
            "model.heads": 6,
            "model.dense_width": 50,
            "model.moe.expert_width": 17,
            "model.attention.kind": kind,
            "model.attention.kv_heads": 3,
            "model.attention.q_lora_rank": 10,
            "model.tie_embeddings": kind == "gqa",
            # Large weights, so that scores, and what balances them, differ from even.
            "model.init_std": 0.3,
        }
    )
    inputs = torch.arange(2 * positions).view(2, positions) * 5 % VOCABULARY
    documents = (torch.arange(positions) > 3).long().expand(2, -1)
    batch = (inputs, documents, inputs.roll(-1, 1))

    def build(tensor: TensorParallel) -> Transformer:
        model = Transformer(config.model, VOCABULARY, tensor=tensor)
        initialise(model, config.model, seed=3)
        return model

    def on_rank(tensor: TensorParallel) -> tuple[Any, dict[str, Any]]:
        model = build(tensor)
        logits = model.logits(*batch[:2]).detach()
        return (*numbers(model, *batch), logits), model.cuts()

    single = build(TensorParallel())
    logits = single.logits(*batch[:2]).detach()
    losses, loads, grads = numbers(single, *batch)
    results = together(on_rank)
    torch.testing.assert_close(sum(r[0][0] for r in results), losses, rtol=1e-5, atol=0)
    assert torch.equal(sum(r[0][1] for r in results), loads)
    for result, cuts in results:
        torch.testing.assert_close(result[3], logits, rtol=1e-5, atol=1e-5)
        assert len(cuts) >= 10
        for name, grad in grads.items():
            # Weights in parts have their gradient of all tokens; of others ranks have parts of it.
            alone = cuts[name].of(grad) if name in cuts else grad
            mine = result[2][name] if name in cuts else sum(r[0][2][name] for r in results)
            difference = float((mine - alone).norm() / alone.norm().clamp_min(1e-9))
            assert difference < 1e-5, name


def test_every_rank_starts_with_its_part_of_the_same_weights(tiny: Tiny) -> None:
    model = tiny(**{"model.heads": 4, "model.width": 36}).model
    whole = Transformer(model, VOCABULARY)
    initialise(whole, model, seed=5)
    for rank in range(4):
        tensor = TensorParallel()
        tensor.rank, tensor.ranks = rank, 4
        # What a group would say; nothing is sent while weights are drawn.
        tensor._group = dist.ProcessGroup(rank, 4)
        part = Transformer(model, VOCABULARY, tensor=tensor)
        initialise(part, model, seed=5)
        cuts = part.cuts()
        for name, weight in whole.named_parameters():
            here = part.get_parameter(name)
            assert torch.equal(here, cuts[name].of(weight) if name in cuts else weight), name


def test_the_balancing_losses_of_parts_of_sequences_add_up_gradients_included() -> None:
    scores = draw(3 * 10, 6).abs()
    ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(n))[:2]
                       for n in range(30)])  # fmt: skip
    whole = scores.clone().requires_grad_()
    want = sequence_balance_loss(whole, ids, 3)
    want.backward()
    parts = [slice(0, 4), slice(4, 9), slice(9, 10), slice(10, 10)]
    rows = [ids.view(3, 10, 2)[:, part].flatten(0, 1) for part in parts]
    chosen = torch.stack([count_choices(row, 3, 6) for row in rows]).sum(0)
    total = torch.zeros((), dtype=torch.float64)
    split = scores.clone().requires_grad_()
    for part, row in zip(parts, rows, strict=True):
        mine = split.view(3, 10, 6)[:, part].flatten(0, 1)
        total = total + sequence_balance_loss(mine, row, 3, length=10, chosen_RE=chosen)
    total.backward()
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(split.grad, whole.grad)


def test_a_peer_lost_in_a_step_is_one_line(fork: Callable[..., Any], tmp_path: Path) -> None:
    def one(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        tensor = TensorParallel(dist.group.WORLD)
        tensor.sum_(torch.ones(1))
        if rank == 1:
            os._exit(9)
        groups = Groups(Layout(tp=2), store)
        with pytest.raises(TrainError) as caught, groups.among_peers("in the forward pass"):
            for _ in range(3):
                tensor.sum_(torch.ones(1))
        assert caught.value.code == "E-PEER"
        assert "rank 0, in the forward pass, found that another rank has left" in str(caught.value)
        with pytest.raises(RuntimeError, match="shape"), groups.among_peers("at home"):
            raise RuntimeError("a shape of our own that is wrong")

    first, second = (fork(lambda rank=rank: one(rank)) for rank in range(2))
    assert second.wait()[0] == 9
    code, _, errors = first.wait()
    assert code == 0, errors
