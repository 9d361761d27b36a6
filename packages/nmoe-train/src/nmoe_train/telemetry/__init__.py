"""The run folder: run.json, events, metrics. Written here, read by the dashboard."""

from nmoe_train.telemetry.flops import peak_flops, training_flops_per_token
from nmoe_train.telemetry.metrics import MetricsWriter
from nmoe_train.telemetry.run_folder import RunFolder, close_record, next_record

__all__ = [
    "MetricsWriter",
    "RunFolder",
    "close_record",
    "next_record",
    "peak_flops",
    "training_flops_per_token",
]
