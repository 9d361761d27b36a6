"""Fixtures of the tests of nmoe-kernels."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random inputs on every run."""
    torch.manual_seed(20)


@pytest.fixture
def poisoned_memory():
    """New memory of torch is filled with NaN, so that whatever is left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2, 2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
