"""Attention layers, by the name that `model.attention.kind` takes."""

from torch import nn

from nmoe_train.config import ModelConfig
from nmoe_train.model.attention.gqa import GroupedQueryAttention
from nmoe_train.model.attention.masking import document_mask
from nmoe_train.model.attention.mla import MultiHeadLatentAttention
from nmoe_train.model.tensor import WHOLE, TensorParallel

KINDS: dict[str, type[MultiHeadLatentAttention] | type[GroupedQueryAttention]] = {
    "mla": MultiHeadLatentAttention,
    "gqa": GroupedQueryAttention,
}


def build_attention(config: ModelConfig, tensor: TensorParallel = WHOLE) -> nn.Module:
    """The attention layer that a configuration names, with this rank's heads."""
    return KINDS[config.attention.kind](config, tensor)


__all__ = ["KINDS", "build_attention", "document_mask"]
