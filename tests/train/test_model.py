"""The transformer against a plain one in fp64, and what must not depend on what.

Letters: S positions, H width, N heads, E experts.
"""

import math
from collections.abc import Callable

import pytest
import torch
from nmoe_train.config import Config
from nmoe_train.model import Transformer, initialise
from nmoe_train.model.moe_block import router_bias
from nmoe_train.model.rope import rotary_table, rotate
from torch import Tensor

MLA = {}
MLA_LOW_RANK_QUERY = {"model.attention.q_lora_rank": 10}
GQA = {"model.attention.kind": "gqa", "model.attention.kv_heads": 1}
GQA_WIDE = {"model.attention.kind": "gqa", "model.attention.head_dim": 6, "model.heads": 4}
KINDS = pytest.mark.parametrize(
    "kind", [MLA, MLA_LOW_RANK_QUERY, GQA, GQA_WIDE], ids=["mla", "mla-q", "gqa", "gqa-wide"]
)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [0] * 16])


def tokens(rows: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(0, 257, (rows, 16), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def lively(build: Callable[..., Transformer]) -> Callable[..., Transformer]:
    """A model with weights large enough that every part shows in the result."""

    def make(config: Config, dtype: torch.dtype = torch.float32) -> Transformer:
        model = build(config, dtype)
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=draw)
                if parameter.ndim > 1:
                    parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
                else:
                    parameter.add_(noise * 0.1)
            for block in model.moe_blocks().values():
                bias = router_bias(block)
                bias.copy_(torch.linspace(-0.3, 0.3, len(bias)))
        return model

    return make


class Plain:
    """The same model in fp64, token by token, expert by expert, straight from the definitions."""

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self.tensors = {
            name: tensor.detach().double()
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }

    def logits(self, ids: Tensor, documents: Tensor) -> Tensor:
        return torch.stack([self._row(*pair) for pair in zip(ids, documents, strict=True)])

    def _row(self, ids: Tensor, documents: Tensor) -> Tensor:
        x = self.tensors["embedding.weight"][ids]
        for number in range(self.config.layers):
            layer = f"layers.{number}."
            normed = self._norm(x, layer + "attention_norm")
            attend = self._mla if self.config.attention.kind == "mla" else self._gqa
            x = x + attend(normed, layer + "attention.", documents)
            normed = self._norm(x, layer + "ffn_norm")
            dense = number < self.config.dense_layers
            x = x + (
                self._mlp(normed, layer + "mlp.")
                if dense
                else torch.stack([self._moe(row, layer + "moe.") for row in normed])
            )
        return self._norm(x, "norm") @ self.tensors["head.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        square = (x * x).mean(-1, keepdim=True)
        return x / (square + self.config.norm_eps).sqrt() * self.tensors[name + ".weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[name + ".weight"].T

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self._linear(x, name + "gate"), self._linear(x, name + "up")
        return self._linear(gate * torch.sigmoid(gate) * up, name + "down")

    def _moe(self, x: Tensor, name: str) -> Tensor:
        moe = self.config.moe
        scores = torch.sigmoid(self.tensors[name + "experts.router.weight"] @ x)
        biased = (scores + self.tensors[name + "experts.router.bias"]).tolist()
        chosen = sorted(range(moe.experts), key=lambda e: (-biased[e], e))[: moe.top_k]
        total = sum(float(scores[e]) for e in chosen)
        y = self._mlp(x, name + "shared.")
        for expert in chosen:
            gate, up = (self.tensors[name + "experts.gate_up"][expert] @ x).chunk(2)
            hidden = gate * torch.sigmoid(gate) * up
            weight = float(scores[expert]) / total * moe.scale
            y = y + weight * (self.tensors[name + "experts.down"][expert] @ hidden)
        return y

    def _turn(self, x: Tensor, position: int) -> Tensor:
        """Rotary position by complex numbers: x[i] + i x[i + D/2] turns by its angle."""
        half = len(x) // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        angles = position * self.config.rope_theta**-exponents
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half).double(), angles)
        return torch.cat((turned.real, turned.imag))

    def _attend(
        self, q: list[Tensor], k: list[Tensor], v: list[Tensor], documents: Tensor
    ) -> list[Tensor]:
        """One head: softmax over the earlier positions of the same document."""
        out = []
        for i, query in enumerate(q):
            seen = [j for j in range(i + 1) if documents[j] == documents[i]]
            scores = torch.stack([query @ k[j] for j in seen]) / math.sqrt(len(query))
            out.append(torch.softmax(scores, 0) @ torch.stack([v[j] for j in seen]))
        return out

    def _gqa(self, x: Tensor, name: str, documents: Tensor) -> Tensor:
        heads, shape = self.config.heads, self.config.attention
        dim = shape.head_dim or self.config.width // heads
        groups = shape.kv_heads or heads
        q = self._linear(x, name + "query").unflatten(-1, (heads, dim))
        k = self._linear(x, name + "key").unflatten(-1, (groups, dim))
        v = self._linear(x, name + "value").unflatten(-1, (groups, dim))
        columns = []
        for head in range(heads):
            group = head // (heads // groups)
            turned_q = [self._turn(q[i, head], i) for i in range(len(x))]
            turned_k = [self._turn(k[i, group], i) for i in range(len(x))]
            columns.append(
                torch.stack(self._attend(turned_q, turned_k, list(v[:, group]), documents))
            )
        return self._linear(torch.cat(columns, -1), name + "output")

    def _mla(self, x: Tensor, name: str, documents: Tensor) -> Tensor:
        heads, shape = self.config.heads, self.config.attention
        nope, rank = shape.qk_nope_head_dim, shape.kv_lora_rank
        source = x
        if shape.q_lora_rank:
            source = self._norm(self._linear(x, name + "q_down"), name + "q_norm")
        q = self._linear(source, name + "q_up").unflatten(-1, (heads, -1))
        compressed = self._linear(x, name + "kv_down")
        latent = self._norm(compressed[:, :rank], name + "kv_norm")
        shared_key = [self._turn(compressed[i, rank:], i) for i in range(len(x))]
        kv = self._linear(latent, name + "kv_up").unflatten(-1, (heads, -1))
        columns = []
        for head in range(heads):
            queries = [
                torch.cat((q[i, head, :nope], self._turn(q[i, head, nope:], i)))
                for i in range(len(x))
            ]
            keys = [torch.cat((kv[i, head, :nope], shared_key[i])) for i in range(len(x))]
            values = list(kv[:, head, nope:])
            columns.append(torch.stack(self._attend(queries, keys, values, documents)))
        return self._linear(torch.cat(columns, -1), name + "output")


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want).norm() / want.norm())


@KINDS
def test_the_model_is_its_definition(
    tiny: Callable[..., Config], lively: Callable[..., Transformer], kind: dict[str, object]
) -> None:
    model = lively(tiny(**kind, **{"model.moe.scale": 1.7}))
    got = model.logits(tokens(), DOCUMENTS)
    # fp32 through two layers: a few hundred roundings of 6e-8.
    assert relative_error(got, Plain(model).logits(tokens(), DOCUMENTS)) < 2e-6


@KINDS
def test_bf16_stays_near_the_definition(
    tiny: Callable[..., Config], lively: Callable[..., Transformer], kind: dict[str, object]
) -> None:
    # All experts are taken, so that a rounding cannot turn a choice.
    model = lively(tiny(**kind, **{"model.moe.top_k": 4}), torch.bfloat16)
    got = model.logits(tokens(), DOCUMENTS)
    assert relative_error(got, Plain(model).logits(tokens(), DOCUMENTS)) < 2e-2


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_later_token_changes_nothing_before_it(
    tiny: Callable[..., Config],
    lively: Callable[..., Transformer],
    kind: dict[str, object],
    dtype: torch.dtype,
) -> None:
    model = lively(tiny(**kind), dtype)
    before = model.logits(tokens(), torch.zeros_like(DOCUMENTS))
    for position in (15, 9):
        changed = tokens()
        changed[:, position:] = (changed[:, position:] + 100) % 257
        after = model.logits(changed, torch.zeros_like(DOCUMENTS))
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@KINDS
def test_a_document_does_not_see_another(
    tiny: Callable[..., Config], lively: Callable[..., Transformer], kind: dict[str, object]
) -> None:
    model = lively(tiny(**kind))
    before = model.logits(tokens(), DOCUMENTS)[0]
    changed = tokens()
    changed[0, :5] = (changed[0, :5] + 100) % 257
    after = model.logits(changed, DOCUMENTS)[0]
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])


@KINDS
def test_a_document_in_the_middle_is_as_if_it_stood_alone(
    tiny: Callable[..., Config], lively: Callable[..., Transformer], kind: dict[str, object]
) -> None:
    model = lively(tiny(**kind))
    ids = tokens()[:1]
    inside = model.logits(ids, DOCUMENTS[:1])[:, 5:12]
    alone = model.logits(ids[:, 5:12], torch.zeros(1, 7, dtype=torch.int64))
    # Only distances enter by the rotation, up to the rounding of its angles.
    torch.testing.assert_close(inside, alone, rtol=1e-5, atol=1e-5)


@KINDS
def test_a_sequence_in_a_batch_is_as_if_it_stood_alone(
    tiny: Callable[..., Config], lively: Callable[..., Transformer], kind: dict[str, object]
) -> None:
    model = lively(tiny(**kind))
    ids, documents = tokens(6), DOCUMENTS[:1].expand(6, -1)
    together = model.logits(ids, documents)
    for row in range(6):
        alone = model.logits(ids[row : row + 1], documents[:1])[0]
        difference = (together[row] - alone).detach().abs().max()
        assert float(difference / alone.detach().abs().max()) < 1e-6


def test_rotary_products_depend_on_the_distance_alone() -> None:
    table = rotary_table(48, 16, 10000.0, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(16, generator=draw).expand(1, 48, 1, 16) for _ in range(2))
    products = (rotate(q, table)[0, :, 0] @ rotate(k, table)[0, :, 0].T).double()
    for distance in range(-47, 48):
        diagonal = products.diagonal(distance)
        assert float(diagonal.max() - diagonal.min()) < 2e-5
    assert float(products[0].max() - products[0].min()) > 1.0


def test_rotation_keeps_lengths_and_leaves_the_first_position_alone() -> None:
    table = rotary_table(9, 6, 100.0, torch.device("cpu"))
    x = torch.randn(2, 9, 3, 6, generator=torch.Generator().manual_seed(1))
    turned = rotate(x, table)
    assert torch.equal(turned[:, 0], x[:, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_every_expert_starts_different(
    tiny: Callable[..., Config], build: Callable[..., Transformer]
) -> None:
    model = build(tiny(**{"model.layers": 3, "model.moe.experts": 8}))
    stacks = [b.experts for b in model.moe_blocks().values()]
    for name in ("gate_up", "down"):
        experts = torch.cat([getattr(stack, name).detach() for stack in stacks]).flatten(1)
        assert len(experts) == 16
        assert len(torch.unique(experts[:, 0])) == 16
        directions = torch.nn.functional.normalize(experts, dim=1)
        overlap = (directions @ directions.T).fill_diagonal_(0).abs().max()
        # Independent directions in 512 dimensions: 5 / sqrt(512) is far out.
        assert float(overlap) < 5 / math.sqrt(512)


def test_a_weight_depends_on_its_name_and_the_seed_alone(
    tiny: Callable[..., Config], build: Callable[..., Transformer]
) -> None:
    small = dict(build(tiny()).named_parameters())
    other = {"model.dense_width": 80, "model.moe.experts": 8, "model.moe.shared_experts": 2}
    large = dict(build(tiny(**other)).named_parameters())
    resized = 0
    for name, weight in small.items():
        if weight.shape == large[name].shape:
            assert torch.equal(weight, large[name]), name
        elif ".experts." in name and "router" not in name:
            assert torch.equal(weight, large[name][:4]), name
        else:
            resized += 1
    # The dense MLP's and the shared expert's three matrices, and the router's.
    assert resized == 7


def test_another_seed_gives_other_weights(
    tiny: Callable[..., Config], build: Callable[..., Transformer]
) -> None:
    one, two = (dict(build(tiny(**{"run.seed": seed})).named_parameters()) for seed in (0, 1))
    for name in one:
        assert torch.equal(one[name], two[name]) is ("norm" in name), name


def test_initial_weights_have_the_stated_spread(
    tiny: Callable[..., Config], build: Callable[..., Transformer]
) -> None:
    config = tiny(**{"model.init_std": 0.1, "model.layers": 8})
    for name, weight in build(config).named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        into_residual = name.endswith(("output.weight", ".down.weight", "experts.down"))
        wanted = 0.1 / math.sqrt(16) if into_residual else 0.1
        # A sample of n numbers has a spread that is right to 1 / sqrt(2 n); five times that.
        slack = 5 / math.sqrt(2 * weight.numel())
        assert float(weight.detach().std()) == pytest.approx(wanted, rel=slack), name


def test_the_router_bias_starts_at_zero(
    tiny: Callable[..., Config], build: Callable[..., Transformer]
) -> None:
    for block in build(tiny()).moe_blocks().values():
        assert torch.equal(router_bias(block), torch.zeros(4))


def test_tied_embeddings_are_one_tensor_that_learns_from_both_ends(
    tiny: Callable[..., Config], build: Callable[..., Transformer]
) -> None:
    model = build(tiny(**{"model.tie_embeddings": True}))
    names = dict(model.named_parameters())
    assert "head.weight" not in names
    assert model.output_weight is names["embedding.weight"]
    hidden = model.hidden(tokens(), DOCUMENTS).hidden_BSH
    logits = model.logits(tokens(), DOCUMENTS)
    torch.testing.assert_close(logits, hidden @ names["embedding.weight"].T)
    logits.square().sum().backward()
    gradient = names["embedding.weight"].grad
    assert gradient is not None
    unseen = [token for token in range(257) if token not in set(tokens().flatten().tolist())]
    assert bool((gradient[unseen].abs().sum(1) > 0).all()), "the output end"
    seen_once = int(tokens()[0, 0])
    alone = torch.autograd.grad(
        (hidden.detach() @ names["embedding.weight"].T).square().sum(), names["embedding.weight"]
    )[0]
    assert not torch.allclose(gradient[seen_once], alone[seen_once]), "the input end"


def test_dense_and_expert_layers_stand_where_the_configuration_says(
    tiny: Callable[..., Config], build: Callable[..., Transformer]
) -> None:
    model = build(tiny(**{"model.layers": 4, "model.dense_layers": 2}))
    assert list(model.moe_blocks()) == [2, 3]
    assert list(model.hidden(tokens(), DOCUMENTS).routing) == [2, 3]
    without = build(tiny(**{"model.moe.shared_experts": 0}))
    assert not [name for name, _ in without.named_parameters() if "shared" in name]


def test_routing_reports_count_every_token_once(
    tiny: Callable[..., Config], build: Callable[..., Transformer]
) -> None:
    report = build(tiny()).hidden(tokens(), DOCUMENTS).routing[1]
    assert int(report.load_E.sum()) == 2 * 16 * 2
    assert int(report.invalid) == 0


@pytest.mark.parametrize("tied_scores", [False, True], ids=["lively", "ties"])
def test_recomputing_layers_changes_no_bit(
    tiny: Callable[..., Config], lively: Callable[..., Transformer], tied_scores: bool
) -> None:
    results = []
    for recompute in ("none", "layer"):
        model = lively(tiny(**{"train.recompute": recompute}))
        if tied_scores:
            for block in model.moe_blocks().values():
                block.experts.router.weight.data.zero_()
                router_bias(block).zero_()
        calls: list[int] = []
        for layer in model.layers:
            layer.attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        output = model.hidden(tokens(), DOCUMENTS)
        report = output.routing[1]
        loss = output.hidden_BSH.square().mean() + report.balance_loss + report.z_loss
        loss.backward()
        assert len(calls) == (4 if recompute == "layer" else 2)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append((loss.detach(), report.load_E, gradients))
    plain, again = results
    assert torch.equal(plain[0], again[0])
    assert torch.equal(plain[1], again[1])
    assert int(again[1].sum()) == 2 * 16 * 2
    for name, gradient in plain[2].items():
        if gradient is None:
            assert again[2][name] is None, name
        else:
            assert torch.equal(gradient, again[2][name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_parts_held_apart_compute_what_the_whole_does(
    tiny: Callable[..., Config], tied: bool
) -> None:
    changes = {"model.layers": 5, "model.dense_layers": 2, "model.tie_embeddings": tied}
    config = tiny(**changes)
    whole = Transformer(config.model, 257)
    initialise(whole, config.model, config.run.seed)
    tokens, documents = torch.arange(16)[None], torch.zeros(1, 16, dtype=torch.int64)
    want = whole.hidden(tokens, documents)
    state: dict[str, Tensor] = {}
    x, routing = tokens, {}
    for held in ((0,), (1, 2), (3, 4)):
        piece = Transformer(config.model, 257, held=held)
        initialise(piece, config.model, config.run.seed)
        state |= piece.state_dict()
        output = piece.part(x, documents, held)
        x, routing = output.hidden_BSH, {**routing, **output.routing}
    assert torch.equal(x, want.hidden_BSH)
    assert list(routing) == list(want.routing) == [2, 3, 4]
    wanted = whole.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert (piece.embedding is not None) == tied
    assert torch.equal(piece.output_weight, whole.output_weight)
