"""What the machine itself reaches in the same run: a large dense product, and a copy."""

import torch

from nmoe_kernels.bench.timing import time_together

SIZE = {"cuda": 8192, "cpu": 1024}
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}


def measure_ceilings(
    dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, float | int]:
    """dense_size and dense_tflops of a square product, copy_gbps read plus written."""
    size = SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    works = {"dense": lambda: left @ right, "copy": lambda: target.copy_(source)}
    times = time_together(works, device, repeats)
    return {
        "dense_size": size,
        "dense_tflops": 2 * size**3 / times["dense"].ms / 1e9,
        "copy_gbps": 2 * source.nbytes / times["copy"].ms / 1e6,
    }
