"""Figures that moe-engine published for its router, to set beside ours: their machines, their way.

Times of its function `moe_topk_route` in ms for fp32 tokens, means of 20 by the host's clock with a
wait after each; taken from the files that its repository holds.
"""

from nmoe_kernels.bench.shapes import PUBLISHED

CONDITIONS = "fp32, mean of 20, host clock with a wait after each"
FIGURES = {
    "engine-s1": {"T4": (0.239, 0.963), "A100": (0.25, 0.89)},
    "engine-s2": {"T4": (0.281, 0.961), "A100": (0.26, 0.93)},
    "engine-s3": {"T4": (0.424, 1.326), "A100": (0.35, 1.01)},
    "engine-s4": {"T4": (0.920, 2.841), "A100": (0.40, 1.10)},
}


def published_rows() -> list[dict[str, str | float]]:
    """A row for each shape and machine: forward and both in ms, and the conditions."""
    return [
        {
            "shape": str(PUBLISHED[name]),
            "source": f"moe-engine on a {machine}",
            "forward_ms": forward,
            "both_ms": both,
            "conditions": CONDITIONS,
        }
        for name, machines in FIGURES.items()
        for machine, (forward, both) in machines.items()
    ]
