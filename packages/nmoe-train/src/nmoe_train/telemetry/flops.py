"""Model FLOPs of a token, by a stated formula, and the peak of the device, for the MFU.

A matrix of a x b costs 2ab per token forward and twice that backward; only the experts that a token
visits count; attention costs 2 * heads * (query-key + value width) per pair of positions, of which
a causal sequence of S has S/2 per token. Embedding look-ups, norms and recomputation count nothing.
"""

import torch

from nmoe_train.config import ModelConfig

# Dense bf16 matrix peak by name of the device, from the vendors' data sheets.
PEAK_TFLOPS = {"B200": 2250.0, "GB200": 2500.0, "H200": 989.0, "H100": 989.0, "A100": 312.0}


def training_flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> float:
    """FLOPs of forward and backward for one token in a sequence of `seq_len`."""
    attention = _attention_weights(config) + _attention_pairs(config) * seq_len / 2
    dense = 3 * config.width * config.dense_width
    moe = config.moe
    visited = moe.top_k + moe.shared_experts
    sparse = 3 * config.width * moe.expert_width * visited + config.width * moe.experts
    per_token = (
        config.layers * attention
        + config.dense_layers * dense
        + (config.layers - config.dense_layers) * sparse
        + config.width * vocab_size
    )
    return 6.0 * per_token


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


def _attention_weights(config: ModelConfig) -> int:
    """Weights of one attention layer's matrices."""
    shape, heads, width = config.attention, config.heads, config.width
    if shape.kind == "gqa":
        return width * config.head_dim * (2 * heads + 2 * (shape.kv_heads or heads))
    query_dim = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    query = shape.q_lora_rank * (width + query_dim) if shape.q_lora_rank else width * query_dim
    key_value = width * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    key_value += shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    return query + key_value + heads * shape.v_head_dim * width


def _attention_pairs(config: ModelConfig) -> int:
    """Multiply-adds of one attention layer for one pair of query and key."""
    shape, heads = config.attention, config.heads
    if shape.kind == "gqa":
        return 2 * heads * config.head_dim
    return heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim)
