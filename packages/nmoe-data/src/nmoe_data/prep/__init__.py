"""From sources to dataset folders: read, split, tokenise, write, resume."""

from nmoe_data.prep.result import PrepProgress, PrepResult
from nmoe_data.prep.run import DEFAULT_SHARD_TOKENS, prep

__all__ = ["DEFAULT_SHARD_TOKENS", "PrepProgress", "PrepResult", "prep"]
