"""The way to a judge: requests paid once, limits that adapt, failures under their own names."""

from nmoe_data.hydra.client.budget import Budget, Usage
from nmoe_data.hydra.client.cache import RequestCache, StoredReply
from nmoe_data.hydra.client.settings import JudgeSettings
from nmoe_data.hydra.client.transport import Transport

__all__ = [
    "Budget",
    "JudgeSettings",
    "RequestCache",
    "StoredReply",
    "Transport",
    "Usage",
]
