"""Model FLOPs of a token, by the formula of `model.costs`, and the peak of the device: the MFU."""

import torch

from nmoe_train.config import ModelConfig
from nmoe_train.model.costs import BACKWARD, head_cost, layer_cost

# Dense bf16 matrix peak by name of the device, from the vendors' data sheets.
PEAK_TFLOPS = {"B200": 2250.0, "GB200": 2500.0, "H200": 989.0, "H100": 989.0, "A100": 312.0}


def training_flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> float:
    """FLOPs of forward and backward for one token in a sequence of `seq_len`."""
    layers = (layer_cost(config, number, seq_len) for number in range(config.layers))
    forward = sum(cost.flops for cost in layers) + head_cost(config, vocab_size).flops
    return forward * (1 + BACKWARD)


def peak_flops(device: torch.device, stated_tflops: float | None) -> float | None:
    """Peak FLOP/s of a device: as stated, or by its name; None if neither is known."""
    if stated_tflops is not None:
        return stated_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # The longest name that fits: a GB200 is not a B200.
    known = max((word for word in PEAK_TFLOPS if word in name), key=len, default=None)
    return None if known is None else PEAK_TFLOPS[known] * 1e12
