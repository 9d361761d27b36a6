"""Grouped-query attention (Ainslie et al. 2023): groups of query heads share a key-value head.

Letters: B sequences, S positions, H width, N query heads, G key-value heads, D head width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_train.config import ModelConfig
from nmoe_train.model.layers import Linear
from nmoe_train.model.rope import rotate


class GroupedQueryAttention(nn.Module):
    """Rotary attention over N query heads and G key-value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.attention.kv_heads or config.heads
        self.head_dim = self.rotary_dim(config)
        self.query = Linear(config.width, self.heads * self.head_dim)
        self.key = Linear(config.width, self.kv_heads * self.head_dim)
        self.value = Linear(config.width, self.kv_heads * self.head_dim)
        self.output = Linear(self.heads * self.head_dim, config.width)

    @staticmethod
    def rotary_dim(config: ModelConfig) -> int:
        """Rotary dimensions that the table must have: the whole head."""
        return config.head_dim

    def forward(self, x_BSH: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        """Attends within x [B, S, H]; `table` from `rotary_table`, `mask` from `document_mask`."""
        batch, length, _ = x_BSH.shape
        q_BSND = rotate(self.query(x_BSH).view(batch, length, self.heads, -1), table)
        k_BSGD = rotate(self.key(x_BSH).view(batch, length, self.kv_heads, -1), table)
        v_BSGD = self.value(x_BSH).view(batch, length, self.kv_heads, -1)
        y_BNSD = F.scaled_dot_product_attention(
            q_BSND.transpose(1, 2),
            k_BSGD.transpose(1, 2),
            v_BSGD.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(y_BNSD.transpose(1, 2).reshape(batch, length, -1))
