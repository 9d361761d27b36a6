"""How well the heads agree with the judge, and what it cost: measured, with intervals."""

from nmoe_data.hydra.report.measures import AGREES, NO_AGREEMENT
from nmoe_data.hydra.report.run import ReportResult, make_report

__all__ = ["AGREES", "NO_AGREEMENT", "ReportResult", "make_report"]
