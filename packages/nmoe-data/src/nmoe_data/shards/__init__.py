"""Token shards on disk: their layout and manifest, the resumable writer, and the checks."""

from nmoe_data.shards.layout import (
    INDEX_DTYPE,
    Manifest,
    ShardInfo,
    map_dataset,
    map_shard,
    read_manifest,
    token_dtype,
    write_manifest,
)
from nmoe_data.shards.verify import changed_files, find_problems
from nmoe_data.shards.writer import ShardWriter

__all__ = [
    "INDEX_DTYPE",
    "Manifest",
    "ShardInfo",
    "ShardWriter",
    "changed_files",
    "find_problems",
    "map_dataset",
    "map_shard",
    "read_manifest",
    "token_dtype",
    "write_manifest",
]
