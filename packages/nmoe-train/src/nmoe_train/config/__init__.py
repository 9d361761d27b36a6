"""Configuration of a run: its schema, and how a TOML file, the environment and --set become one."""

from nmoe_train.config.load import describe_schema, load_config
from nmoe_train.config.schema import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
)

__all__ = [
    "AttentionConfig",
    "Config",
    "DataConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "describe_schema",
    "load_config",
]
