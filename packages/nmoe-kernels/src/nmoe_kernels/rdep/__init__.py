"""RDEP: expert parallelism. Tokens go straight to the ranks that own the chosen experts, and back.

`ExpertParallel` is a group of ranks that share the experts of layers of one shape;
`expert_parallel_moe` runs such a layer on it; `nmoe_kernels.MoE` takes a group as
`expert_parallel`.
"""

from nmoe_kernels.rdep.counters import Counters
from nmoe_kernels.rdep.group import ExpertParallel
from nmoe_kernels.rdep.layer import expert_parallel_moe
from nmoe_kernels.rdep.settings import Settings

__all__ = ["Counters", "ExpertParallel", "Settings", "expert_parallel_moe"]
