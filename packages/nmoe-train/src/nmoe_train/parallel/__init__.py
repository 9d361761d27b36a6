"""How processes share the work. The loop asks here and nowhere else who it is.

`layout` is arithmetic and loads no torch; `groups`, `reduction` and `experts` stand on it.
"""

from nmoe_train.parallel.layout import Layout, check_layout, current_layout

__all__ = ["Layout", "check_layout", "current_layout"]
