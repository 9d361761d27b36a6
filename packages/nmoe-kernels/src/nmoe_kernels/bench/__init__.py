"""Benchmarks of the router, the products and the layer: verified against fp64, then timed together.

`measure_router`, `measure_gemm` and `measure_moe` each take one shape and routing and give a
`Measurement` for every contender: ours by backend, peers where they are installed, and a plain
product or read of the same size as the ceiling.
"""

from nmoe_kernels.bench.gemm import measure_gemm
from nmoe_kernels.bench.measure import Measurement
from nmoe_kernels.bench.moe import measure_moe
from nmoe_kernels.bench.router import measure_router
from nmoe_kernels.bench.shapes import RouterShape, Shape

__all__ = [
    "Measurement",
    "RouterShape",
    "Shape",
    "measure_gemm",
    "measure_moe",
    "measure_router",
]
