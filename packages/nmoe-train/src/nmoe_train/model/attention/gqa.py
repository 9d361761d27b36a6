"""Grouped-query attention (Ainslie et al. 2023): groups of query heads share a key-value head.

Letters: B sequences, S positions, s of them here, H width, N query heads and G key-value heads of
this rank, D head width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_train.config import ModelConfig
from nmoe_train.model.layers import Linear
from nmoe_train.model.rope import rotate
from nmoe_train.model.tensor import WHOLE, Stack, TensorParallel


class GroupedQueryAttention(nn.Module):
    """Rotary attention; ranks share the heads evenly."""

    def __init__(self, config: ModelConfig, tensor: TensorParallel = WHOLE) -> None:
        super().__init__()
        self.tensor = tensor
        heads, kv_heads = config.heads, config.attention.kv_heads or config.heads
        self.heads, self.kv_heads = heads // tensor.ranks, kv_heads // tensor.ranks
        head = config.head_dim
        query, key_value = heads * head, kv_heads * head
        shared = Stack(0, (head,) * kv_heads)
        self.query = Linear(config.width, query, tensor.cut(0, query), Stack(0, (head,) * heads))
        self.key = Linear(config.width, key_value, tensor.cut(0, key_value), shared)
        self.value = Linear(config.width, key_value, tensor.cut(0, key_value), shared)
        self.output = Linear(query, config.width, tensor.cut(1, query), Stack(1, (head,) * heads))

    @staticmethod
    def rotary_dim(config: ModelConfig) -> int:
        """Rotary dimensions that the table must have: the whole head."""
        return config.head_dim

    def forward(self, x_BsH: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        """Attends within sequences of which x [B, s, H] are this rank's positions.

        `table` from `rotary_table` and `mask` from `document_mask` are for all positions.
        """
        x_BSH = self.tensor.gather(x_BsH, table.shape[1])
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
        y_BSH = self.output(y_BNSD.transpose(1, 2).reshape(batch, length, -1))
        return self.tensor.scatter_sum(y_BSH)
