"""What the real layers keep for their backward, and send to tensor-parallel ranks, without memory.

The model's own code runs on fake tensors, which have shapes and no numbers. What autograd saves is
counted, every storage once. Run with one sequence and with two, it tells what is kept of a sequence
from what is kept anyhow: weights in the format of the activations, the gradient of the output
projection. Attention stands in as a fused kernel saves it: queries, keys, values, the mask, output
and one number a row, never scores. Routed experts are taken to be used evenly.

Letters: B sequences, S positions, s of them on a rank, H width, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from nmoe_train.config import Config
from nmoe_train.model import Transformer
from nmoe_train.model.attention import KINDS, document_mask
from nmoe_train.model.costs import expert_weights
from nmoe_train.model.rope import rotary_table
from nmoe_train.model.tensor import TensorParallel
from nmoe_train.model.transformer import Layer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Footprint:
    """Of one part of the model, on one rank."""

    per_sequence: float
    """Bytes kept for the backward of each sequence."""
    fixed: float
    """Bytes kept for a micro-batch, whatever its sequences."""
    sent: float
    """Bytes that the forward of a sequence sends to tensor-parallel ranks."""


class CountingTensor(TensorParallel):
    """Rank 0 of a tensor-parallel group that sends nothing: shapes are right, bytes are counted."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.ranks = ranks
        self.sent = 0

    @property
    def alone(self) -> bool:
        """Whether nothing is split."""
        return self.ranks == 1

    def collect(self, x: Tensor, dim: int, whole: int) -> Tensor:
        """The shape of the whole; what is here would go to all others."""
        self.sent += x.nbytes * (self.ranks - 1)
        return x.new_empty([*x.shape[:dim], whole, *x.shape[dim + 1 :]])

    def collect_sum(self, x: Tensor, dim: int) -> Tensor:
        """The shape of this rank's part; all others would leave."""
        self.sent += x.nbytes * (self.ranks - 1) // self.ranks
        return x.new_empty([*x.shape[:dim], self.lengths(x.shape[dim])[0], *x.shape[dim + 1 :]])


def layer_footprint(
    config: Config, number: int, tensor: CountingTensor, expert_tensor: CountingTensor
) -> Footprint:
    """One layer, with all experts here, or this rank's part of each."""
    model, dtype = config.model, DTYPES[config.precision.dtype]

    def run(sequences: int) -> tuple[list[Tensor], Callable[[], object]]:
        layer = Layer(model, number, None, tensor, expert_tensor)
        table, mask = _surroundings(config, sequences)
        x_BsH = _states(config, sequences, tensor, dtype)
        weights = [*layer.parameters(), table, mask]
        return weights, lambda: layer(x_BsH, table, mask)

    return _measure(run, tensor, expert_tensor)


def head_footprint(config: Config, vocab_size: int, tensor: CountingTensor) -> Footprint:
    """The final norm and the loss."""
    model, dtype = config.model, DTYPES[config.precision.dtype]

    def run(sequences: int) -> tuple[list[Tensor], Callable[[], object]]:
        last = model.layers - 1
        end = Transformer(model, vocab_size, dtype=dtype, held=[last], tensor=tensor)
        x_BsH = _states(config, sequences, tensor, dtype)
        targets_BS = torch.zeros(sequences, config.train.seq_len, dtype=torch.int64)
        assert end.norm is not None
        norm = end.norm
        return [*end.parameters()], lambda: end.loss(norm(x_BsH), targets_BS, _whole(config))

    return _measure(run, tensor)


def expert_casts(config: Config) -> float:
    """Bytes of all experts of a layer in the format of the activations, kept for the backward."""
    dtype = DTYPES[config.precision.dtype]
    if dtype == torch.float32:
        return 0.0
    return config.model.moe.experts * expert_weights(config.model) * dtype.itemsize


def mask_bytes(config: Config) -> int:
    """Of the mask of one sequence, which all layers of a part share."""
    return config.train.seq_len**2


def _whole(config: Config) -> int:
    """A chunk that takes all tokens: what is kept does not depend on the chunk."""
    return 2 * config.train.seq_len


def _surroundings(config: Config, sequences: int) -> tuple[Tensor, Tensor]:
    model, positions = config.model, config.train.seq_len
    dim = KINDS[model.attention.kind].rotary_dim(model)
    table = rotary_table(positions, dim, model.rope_theta, torch.device("cpu"))
    return table, document_mask(torch.zeros(sequences, positions, dtype=torch.int64))


def _states(config: Config, sequences: int, tensor: TensorParallel, dtype: torch.dtype) -> Tensor:
    here = tensor.lengths(config.train.seq_len)[tensor.rank]
    return torch.empty(sequences, here, config.model.width, dtype=dtype, requires_grad=True)


def _measure(
    run: Callable[[int], tuple[list[Tensor], Callable[[], object]]], *tensors: CountingTensor
) -> Footprint:
    kept, sent = [], []
    for sequences in (1, 2):
        with _FakeTensors(), _FusedAttention():
            weights, forward = run(sequences)
            for tensor in tensors:
                tensor.sent = 0
            with _counting(weights) as found:
                forward()
            kept.append(sum(storage.nbytes() for storage in found.values()))
            sent.append(sum(tensor.sent for tensor in tensors))
    return Footprint(kept[1] - kept[0], 2 * kept[0] - kept[1], sent[1] - sent[0])


class _FakeTensors(FakeTensorMode):
    """Tensors of shapes alone, on the CPU."""

    @property
    def avoid_device_init(self) -> bool:
        """No: it makes autograd ready for a GPU that is not there, which forked children cannot."""
        return False


@contextmanager
def _counting(known: list[Tensor]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that autograd saves inside, by address, but for the known ones."""
    apart = {tensor.untyped_storage()._cdata for tensor in known}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in apart:
            # Kept, so that no other storage gets its address.
            found[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


class _FusedAttention(TorchFunctionMode):
    """Inside, attention saves what a fused kernel does."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*arguments, **(named or {}))
        return _Attention.apply(*arguments[:3], (named or {})["attn_mask"])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        batch, heads, positions, _ = q.shape
        # Laid out so that heads of a position are neighbours, as kernels give it.
        out = q.new_empty(batch, positions, heads, v.shape[3]).transpose(1, 2)
        rows = q.new_empty(q.shape[:3], dtype=torch.float32)
        # Kernels add a mask to the scores, and torch makes numbers of a yes and no for them.
        ctx.save_for_backward(q, k, v, out, rows, mask.to(q.dtype))
        return out
