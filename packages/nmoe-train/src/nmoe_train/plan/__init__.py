"""What a layout of any number of ranks holds, keeps and sends, without starting it."""

from nmoe_train.plan.dry_run import (
    DryRun,
    StageReport,
    check_groups,
    dry_run,
    planned_vocabulary,
)
from nmoe_train.plan.report import lines, summary, tables

__all__ = [
    "DryRun",
    "StageReport",
    "check_groups",
    "dry_run",
    "lines",
    "planned_vocabulary",
    "summary",
    "tables",
]
