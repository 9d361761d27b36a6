"""Rotary position embedding (Su et al. 2021), half-split: dimension i turns with i + D/2.

Letters: B sequences, S positions, N heads, D rotary dimensions (even).
"""

import torch
from torch import Tensor


def rotary_table(positions: int, dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of the angles, fp32 [2, positions, dim / 2]."""
    exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim
    angles = torch.outer(
        torch.arange(positions, device=device, dtype=torch.float64), theta**-exponents
    )
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x_BSND: Tensor, table: Tensor) -> Tensor:
    """Turns x [B, S, N, D] by its positions 0 .. S-1; the result has x's format.

    `table` is `rotary_table`'s, cut to S positions.
    """
    cos, sin = table[:, :, None, :].unbind(0)
    first, second = x_BSND.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BSND.dtype)
