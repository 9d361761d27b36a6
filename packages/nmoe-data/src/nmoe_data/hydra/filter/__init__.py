"""A corpus filtered by calibrated heads: many workers, one order, the same after any stop."""

from nmoe_data.hydra.filter.asking import Asking
from nmoe_data.hydra.filter.result import FilterProgress, FilterResult
from nmoe_data.hydra.filter.run import filter_corpus
from nmoe_data.hydra.filter.settings import FilterSettings

__all__ = ["Asking", "FilterProgress", "FilterResult", "FilterSettings", "filter_corpus"]
