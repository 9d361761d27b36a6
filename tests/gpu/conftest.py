"""Fixtures of the tests that need a GPU."""

import pytest
import torch

# Free blocks of these sizes are filled: powers of two from 512 bytes to 1 GiB.
BLOCK_BITS = range(9, 31)
BLOCKS_OF_A_SIZE = 4


@pytest.fixture
def seeded():
    """The same inputs on every run, and products in full fp32."""
    torch.manual_seed(20)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def poisoned_memory():
    """All memory that a kernel is given or may stray into holds NaN (-1 as an integer).

    New tensors are filled by torch itself, so that what is left unwritten shows; the free blocks of
    its allocator are filled here, so that a read past the end of a tensor shows.
    """
    torch.cuda.empty_cache()
    blocks = [
        torch.full((1 << bits,), 0xFF, dtype=torch.uint8, device="cuda")
        for bits in BLOCK_BITS
        for _ in range(BLOCKS_OF_A_SIZE)
    ]
    del blocks
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
