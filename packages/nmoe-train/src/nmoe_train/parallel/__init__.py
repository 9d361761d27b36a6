"""How processes share the work. The loop asks here and nowhere else who it is."""

from nmoe_train.parallel.layout import Layout, current_layout

__all__ = ["Layout", "current_layout"]
