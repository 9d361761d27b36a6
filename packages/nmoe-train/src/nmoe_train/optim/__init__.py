"""The optimizer: parameter groups with their own rates, the schedule, gradient clipping."""

from nmoe_train.optim.adamw import GuardedAdamW, build_optimizer, clip_gradients, set_rates
from nmoe_train.optim.schedule import rate_factor

__all__ = ["GuardedAdamW", "build_optimizer", "clip_gradients", "rate_factor", "set_rates"]
