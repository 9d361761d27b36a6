"""Widths that every kernel takes: rows that start on 16 bytes.

Zeros at the end of a row of x or of a weight change no result: silu(0) * 0 is 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pad_widths(x_TH: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of an expert MLP with H and I made multiples of 16 bytes by zeros.

    x [T, H], gate_up [E, 2*I, H], down [E, H, I]; unchanged where they already are.
    """
    expert_width = down.shape[2]
    x_pad, i_pad = _missing(x_TH.shape[1], x_TH.dtype), _missing(expert_width, x_TH.dtype)
    if x_pad or i_pad:
        gates = F.pad(gate_up.unflatten(1, (2, expert_width)), (0, x_pad, 0, i_pad))
        x_TH, gate_up = F.pad(x_TH, (0, x_pad)), gates.flatten(1, 2)
        down = F.pad(down, (0, i_pad, 0, x_pad))
    return x_TH, gate_up, down


def _missing(width: int, dtype: torch.dtype) -> int:
    return -width % (16 // dtype.itemsize)
