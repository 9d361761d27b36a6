"""Multi-head latent attention (DeepSeek-V2, section 2.1; arXiv 2405.04434).

Keys and values are projected up from one narrow latent per token; position enters by a separate
rotary part of the query and by one rotary key that all heads share.
Letters: B sequences, S positions, H width, N heads, Q query latent, C key-value latent,
D head part without position, R rotary part, V value head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_train.config import ModelConfig
from nmoe_train.model.layers import Linear, RMSNorm
from nmoe_train.model.rope import rotate


class MultiHeadLatentAttention(nn.Module):
    """MLA without absorbed projections: what training and prefill compute."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.attention
        self.heads = config.heads
        self.nope, self.rope, self.value = (
            shape.qk_nope_head_dim,
            shape.qk_rope_head_dim,
            shape.v_head_dim,
        )
        query_inputs = shape.q_lora_rank or config.width
        if shape.q_lora_rank:
            self.q_down = Linear(config.width, shape.q_lora_rank)
            self.q_norm = RMSNorm(shape.q_lora_rank, config.norm_eps)
        self.q_up = Linear(query_inputs, self.heads * (self.nope + self.rope))
        self.kv_down = Linear(config.width, shape.kv_lora_rank + self.rope)
        self.kv_norm = RMSNorm(shape.kv_lora_rank, config.norm_eps)
        self.kv_up = Linear(shape.kv_lora_rank, self.heads * (self.nope + self.value))
        self.output = Linear(self.heads * self.value, config.width)

    @staticmethod
    def rotary_dim(config: ModelConfig) -> int:
        """Rotary dimensions that the table must have."""
        return config.attention.qk_rope_head_dim

    def forward(self, x_BSH: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        """Attends within x [B, S, H]; `table` from `rotary_table`, `mask` from `document_mask`."""
        batch, length, _ = x_BSH.shape
        q_BSNE = self._queries(x_BSH).view(batch, length, self.heads, self.nope + self.rope)
        q_nope, q_rope = q_BSNE.split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_down(x_BSH).split(
            (self.kv_norm.weight.shape[0], self.rope), dim=-1
        )
        kv = self.kv_up(self.kv_norm(latent)).view(
            batch, length, self.heads, self.nope + self.value
        )
        k_nope, v_BSNV = kv.split((self.nope, self.value), dim=-1)
        k_rope = rotate(k_rope[:, :, None], table).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, table)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        y_BNSV = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v_BSNV.transpose(1, 2), attn_mask=mask
        )
        return self.output(y_BNSV.transpose(1, 2).reshape(batch, length, -1))

    def _queries(self, x_BSH: Tensor) -> Tensor:
        if hasattr(self, "q_down"):
            x_BSH = self.q_norm(self.q_down(x_BSH))
        return self.q_up(x_BSH)
