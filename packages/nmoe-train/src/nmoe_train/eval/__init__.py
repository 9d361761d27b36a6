"""How good a model is: validation loss on held-out shards, and text that it continues."""

from nmoe_train.eval.generate import generate
from nmoe_train.eval.validation import validation_loss

__all__ = ["generate", "validation_loss"]
