"""Benchmarks: the same inputs for every backend in one run, verified before anything is timed."""

from nmoe_kernels.bench.moe import DEFAULT_SHAPES, Measurement, Shape, measure_moe

__all__ = ["DEFAULT_SHAPES", "Measurement", "Shape", "measure_moe"]
