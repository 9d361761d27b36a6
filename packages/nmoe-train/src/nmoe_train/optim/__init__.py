"""The optimizer: weights in groups with their own rates, AdamW and Muon, the schedule, clipping."""

from nmoe_train.optim.adamw import GuardedAdamW, clip_gradients
from nmoe_train.optim.build import build_optimizer, set_rates
from nmoe_train.optim.schedule import rate_factor

__all__ = ["GuardedAdamW", "build_optimizer", "clip_gradients", "rate_factor", "set_rates"]
