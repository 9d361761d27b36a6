"""Mixture-of-Experts on one device: router, grouping by expert, expert MLP, and the layer of them.

Names are imported when first used, so that the command line answers without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmoe_kernels.errors import KernelError
    from nmoe_kernels.grouping import Grouping, group_rows
    from nmoe_kernels.hardware import Hardware, describe, pick_backend
    from nmoe_kernels.layer import MoE, moe
    from nmoe_kernels.router import (
        RouterConfig,
        Routing,
        apply_capacity,
        count_choices,
        load_balance_loss,
        load_stats,
        route,
        sequence_balance_loss,
        update_bias,
        z_loss,
    )

__all__ = [
    "Grouping",
    "Hardware",
    "KernelError",
    "MoE",
    "RouterConfig",
    "Routing",
    "apply_capacity",
    "count_choices",
    "describe",
    "group_rows",
    "load_balance_loss",
    "load_stats",
    "moe",
    "pick_backend",
    "route",
    "sequence_balance_loss",
    "update_bias",
    "z_loss",
]

__version__ = "0.1.0"

ELSEWHERE = {
    "KernelError": "errors",
    "Grouping": "grouping",
    "group_rows": "grouping",
    "Hardware": "hardware",
    "describe": "hardware",
    "pick_backend": "hardware",
    "MoE": "layer",
    "moe": "layer",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{ELSEWHERE.get(name, 'router')}", __name__), name)
    globals()[name] = value
    return value
