"""The decoder-only Mixture-of-Experts transformer: norm, rope, attention, MLP, MoE block, loss."""

from nmoe_train.model.initialise import initialise
from nmoe_train.model.loss import chunked_cross_entropy
from nmoe_train.model.transformer import ModelOutput, Transformer

__all__ = ["ModelOutput", "Transformer", "chunked_cross_entropy", "initialise"]
