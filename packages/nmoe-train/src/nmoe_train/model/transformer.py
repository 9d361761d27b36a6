"""The decoder-only transformer: embedding, pre-norm layers, final norm, output projection.

The first `dense_layers` layers have a dense MLP, the others a Mixture-of-Experts block, as in
DeepSeek-V3 (arXiv 2412.19437). `hidden` gives the states before the output projection, so that the
loss never holds all logits. A model may be held in part, by the layers' numbers: with the first
layer goes the embedding, with the last the final norm and the output projection, and names are
those of the whole. Ranks that share sequences (`model.tensor`) hold a run of positions each between
blocks. Letters: B sequences, S positions, s of them here, H width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from nmoe_kernels.rdep import ExpertParallel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmoe_train.config import ModelConfig
from nmoe_train.model.attention import KINDS, build_attention, document_mask
from nmoe_train.model.layers import Embedding, Linear, RMSNorm, SwiGLU
from nmoe_train.model.loss import chunked_cross_entropy
from nmoe_train.model.moe_block import MoEBlock, RoutingReport
from nmoe_train.model.rope import rotary_table
from nmoe_train.model.tensor import WHOLE, Cut, TensorParallel


@dataclass
class ModelOutput:
    """States before the output projection or the next part, and what every router did."""

    hidden_BSH: Tensor
    routing: dict[int, RoutingReport] = field(default_factory=dict)
    """By layer number; Mixture-of-Experts layers only."""
    is_last: bool = False
    """Whether the states are those before the output projection."""


class Layer(nn.Module):
    """x += attention(norm(x)); x += feed_forward(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        expert_parallel: ExpertParallel | None,
        tensor: TensorParallel,
        expert_tensor: TensorParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = build_attention(config, tensor)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp: SwiGLU | None = None
        self.moe: MoEBlock | None = None
        if number < config.dense_layers:
            self.mlp = SwiGLU(config.width, config.dense_width, tensor)
        else:
            name = f"layers.{number}"
            self.moe = MoEBlock(config, expert_parallel, name, tensor, expert_tensor)

    def forward(
        self, x_BsH: Tensor, table: Tensor, mask: Tensor
    ) -> tuple[Tensor, RoutingReport | None]:
        """One layer on x [B, s, H]; the report is None in a dense layer."""
        positions = table.shape[1]
        x_BsH = x_BsH + self.attention(self.attention_norm(x_BsH), table, mask)
        normed = self.ffn_norm(x_BsH)
        if self.mlp is not None:
            y_BSH = self.mlp(self.tensor.gather(normed, positions))
            return x_BsH + self.tensor.scatter_sum(y_BSH), None
        assert self.moe is not None
        y_BsH, report = self.moe(normed, positions)
        return x_BsH + y_BsH, report


class Layers(nn.Module):
    """The layers that are here, by their number in the whole model."""

    def __init__(self, layers: dict[int, Layer]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def items(self) -> Iterator[tuple[int, Layer]]:
        """Numbers and layers."""
        for name, layer in self.named_children():
            assert isinstance(layer, Layer)
            yield int(name), layer

    def __contains__(self, number: int) -> bool:
        return str(number) in self._modules

    def __iter__(self) -> Iterator[Layer]:
        return (layer for _, layer in self.items())

    def __getitem__(self, number: int) -> Layer:
        layer = self.get_submodule(str(number))
        assert isinstance(layer, Layer)
        return layer


class Transformer(nn.Module):
    """A language model over `vocab_size` tokens; computes in `dtype`, holds fp32 weights.

    With `expert_parallel`, it holds this rank's experts only, and tokens travel to the others. With
    `held`, it holds the layers of these numbers only, and `part` computes them; with `tensor`, this
    rank's part of the dense weights and of every sequence, and with `expert_tensor`, of consecutive
    ranks among those, this rank's part of every expert.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
        expert_parallel: ExpertParallel | None = None,
        held: Sequence[int] | None = None,
        tensor: TensorParallel = WHOLE,
        expert_tensor: TensorParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.recompute = config, dtype, recompute
        self.vocab_size, self.tensor = vocab_size, tensor
        numbers = range(config.layers) if held is None else held
        self._begins, ends = 0 in numbers, config.layers - 1 in numbers
        self.local_experts: range = (
            expert_parallel.local_experts if expert_parallel else range(config.moe.experts)
        )
        """Numbers of the experts whose weights are here, the same in every layer."""
        self.expert_cut = expert_tensor.cut(1, config.moe.expert_width)
        """Which part of each is here, of [2, I, H] (gate, up) and of [H, I]; None if all of it."""
        self.embedding: Embedding | None = None
        if self._begins or (ends and config.tie_embeddings):
            self.embedding = Embedding(vocab_size, config.width, tensor)
        self.layers = Layers(
            {
                number: Layer(config, number, expert_parallel, tensor, expert_tensor)
                for number in numbers
            }
        )
        self.norm: RMSNorm | None = None
        self.head: Linear | None = None
        if ends:
            self.norm = RMSNorm(config.width, config.norm_eps)
            if not config.tie_embeddings:
                self.head = Linear(config.width, vocab_size, tensor.cut(0, vocab_size))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def output_weight(self) -> Tensor:
        """Weight of the output projection, fp32, rows of [V, H]; only with the last layer."""
        output = self.embedding if self.head is None else self.head
        assert output is not None
        return output.weight

    def cuts(self) -> dict[str, Cut]:
        """What of a parameter is here, by name, where tensor-parallel ranks have the rest."""
        split = ((n, m.cut) for n, m in self.named_modules() if isinstance(m, (Linear, Embedding)))
        return {f"{name}.weight": cut for name, cut in split if cut is not None}

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters that another stage holds too: a tied embedding, at the end."""
        tied = self.norm is not None and self.config.tie_embeddings
        return frozenset({"embedding.weight"} if tied and not self._begins else ())

    def moe_blocks(self) -> dict[int, MoEBlock]:
        """Mixture-of-Experts blocks by layer number."""
        blocks = ((number, layer.moe) for number, layer in self.layers.items())
        return {number: block for number, block in blocks if isinstance(block, MoEBlock)}

    def hidden(self, tokens_BS: Tensor, documents_BS: Tensor) -> ModelOutput:
        """States [B, s, H] before the output projection, for tokens [B, S] int64.

        `documents` [B, S] numbers the document of each token; attention stays within it.
        """
        return self.part(tokens_BS, documents_BS, range(self.config.layers))

    def part(self, inputs: Tensor, documents_BS: Tensor, numbers: Sequence[int]) -> ModelOutput:
        """Runs consecutive layers on tokens [B, S], or on the states [B, s, H] before them.

        The result holds the states after them; after the last layer, normed for the output.
        """
        output: ModelOutput = self(inputs, documents_BS, numbers)
        return output

    def forward(self, inputs: Tensor, documents_BS: Tensor, numbers: Sequence[int]) -> ModelOutput:
        """What `part` does, where hooks of a sharded model see it."""
        table = rotary_table(
            documents_BS.shape[1],
            KINDS[self.config.attention.kind].rotary_dim(self.config),
            self.config.rope_theta,
            documents_BS.device,
        )
        mask = document_mask(documents_BS)
        x_BSH = inputs
        if numbers[0] == 0:
            assert self.embedding is not None
            x_BSH = self.embedding(inputs, self.dtype)
        output = ModelOutput(x_BSH)
        for number in numbers:
            x_BSH, report = self._run_layer(self.layers[number], x_BSH, table, mask)
            if report is not None:
                output.routing[number] = report
        output.hidden_BSH = x_BSH
        if numbers[-1] == self.config.layers - 1:
            assert self.norm is not None
            output.hidden_BSH, output.is_last = self.norm(x_BSH), True
        return output

    def loss(self, hidden_BsH: Tensor, targets_BS: Tensor, chunk: int) -> Tensor:
        """Sum of the cross-entropy over the targets [B, S], as `chunked_cross_entropy` says."""
        hidden_BSH = self.tensor.gather(hidden_BsH, targets_BS.shape[1])
        return chunked_cross_entropy(
            hidden_BSH.flatten(0, 1),
            self.output_weight,
            targets_BS.flatten(),
            chunk=chunk,
            tensor=self.tensor,
            first=self._first_row(),
        )

    def logits(self, tokens_BS: Tensor, documents_BS: Tensor) -> Tensor:
        """All logits, fp32 [B, S, V]: for generation and tests, not for training."""
        return self.all_logits(self.hidden(tokens_BS, documents_BS).hidden_BSH, tokens_BS.shape[1])

    def all_logits(self, hidden_BsH: Tensor, positions: int) -> Tensor:
        """All logits, fp32 [B, S, V], of states that `hidden` gave for so many positions.

        Without gradient where ranks share the vocabulary.
        """
        hidden_BSH = self.tensor.gather(hidden_BsH, positions)
        logits = F.linear(hidden_BSH, self.output_weight.to(hidden_BSH.dtype))
        if not self.tensor.alone:
            logits = self.tensor.collect(logits.detach(), 2, self.vocab_size)
        return logits.float()

    def _first_row(self) -> int:
        """Which token the first row of the output projection here is for."""
        cut = self.tensor.cut(0, self.vocab_size)
        return 0 if cut is None else cut.start

    def _run_layer(self, layer: nn.Module, *inputs: Tensor) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return layer(*inputs)
