"""Multi-head latent attention (DeepSeek-V2, section 2.1; arXiv 2405.04434).

Keys and values are projected up from one narrow latent per token; position enters by a separate
rotary part of the query and by one rotary key that all heads share. Under tensor parallelism each
rank makes the latents of its own positions, and ranks gather those rather than the wide states.
Letters: B sequences, S positions, s of them here, H width, N heads of this rank, Q query latent,
C key-value latent, D head part without position, R rotary part, V value head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_train.config import ModelConfig
from nmoe_train.model.layers import Linear, RMSNorm
from nmoe_train.model.rope import rotate
from nmoe_train.model.tensor import WHOLE, Stack, TensorParallel


class MultiHeadLatentAttention(nn.Module):
    """MLA without absorbed projections: what training and prefill compute."""

    def __init__(self, config: ModelConfig, tensor: TensorParallel = WHOLE) -> None:
        super().__init__()
        shape = config.attention
        self.tensor, self.heads = tensor, config.heads // tensor.ranks
        self.nope, self.rope, self.value = (
            shape.qk_nope_head_dim,
            shape.qk_rope_head_dim,
            shape.v_head_dim,
        )
        query_inputs = shape.q_lora_rank or config.width
        if shape.q_lora_rank:
            self.q_down = Linear(config.width, shape.q_lora_rank)
            self.q_norm = RMSNorm(shape.q_lora_rank, config.norm_eps)
        queries = Stack(0, (self.nope, self.rope) * config.heads)
        query = config.heads * (self.nope + self.rope)
        self.q_up = Linear(query_inputs, query, tensor.cut(0, query), queries)
        latents = Stack(0, (shape.kv_lora_rank, self.rope))
        self.kv_down = Linear(config.width, shape.kv_lora_rank + self.rope, stack=latents)
        self.kv_norm = RMSNorm(shape.kv_lora_rank, config.norm_eps)
        key_value, values = config.heads * (self.nope + self.value), config.heads * self.value
        keys_values = Stack(0, (self.nope, self.value) * config.heads)
        self.kv_up = Linear(shape.kv_lora_rank, key_value, tensor.cut(0, key_value), keys_values)
        outputs = Stack(1, (self.value,) * config.heads)
        self.output = Linear(values, config.width, tensor.cut(1, values), outputs)

    @staticmethod
    def rotary_dim(config: ModelConfig) -> int:
        """Rotary dimensions that the table must have."""
        return config.attention.qk_rope_head_dim

    def forward(self, x_BsH: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        """Attends within sequences of which x [B, s, H] are this rank's positions.

        `table` from `rotary_table` and `mask` from `document_mask` are for all positions.
        """
        batch, length = x_BsH.shape[0], table.shape[1]
        queries = self.q_up(self.tensor.gather(self._query_inputs(x_BsH), length))
        q_BSNE = queries.view(batch, length, self.heads, self.nope + self.rope)
        q_nope, q_rope = q_BSNE.split((self.nope, self.rope), dim=-1)
        latent, k_rope = self._latents(x_BsH, length)
        kv = self.kv_up(latent).view(batch, length, self.heads, self.nope + self.value)
        k_nope, v_BSNV = kv.split((self.nope, self.value), dim=-1)
        k_rope = rotate(k_rope[:, :, None], table).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, table)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        y_BNSV = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v_BSNV.transpose(1, 2), attn_mask=mask
        )
        y_BSH = self.output(y_BNSV.transpose(1, 2).reshape(batch, length, -1))
        return self.tensor.scatter_sum(y_BSH)

    def _query_inputs(self, x_BsH: Tensor) -> Tensor:
        """What queries are projected from: the states, or their latent [B, s, Q]."""
        return self.q_norm(self.q_down(x_BsH)) if hasattr(self, "q_down") else x_BsH

    def _latents(self, x_BsH: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Normed latents [B, S, C] and rotary keys [B, S, R], not yet turned, of all positions."""
        parts = (self.kv_norm.weight.shape[0], self.rope)
        latent, k_rope = self.kv_down(x_BsH).split(parts, dim=-1)
        here = torch.cat((self.kv_norm(latent), k_rope), dim=-1)
        latent, k_rope = self.tensor.gather(here, length).split(parts, dim=-1)
        return latent, k_rope
