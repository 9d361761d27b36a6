"""What parts of the model cost by a stated formula: FLOPs of a token, and weights to hold.

A matrix of a x b costs 2ab per token forward and twice that backward; only the experts that a token
visits count; attention costs 2 * heads * (query-key + value width) per pair of positions, of which
a causal sequence of S has S/2 per token. Embedding look-ups, norms and recomputation count nothing.
"""

from dataclasses import dataclass

from nmoe_train.config import ModelConfig

BACKWARD = 2
"""FLOPs of a backward pass, in forward passes: a product each for the input and the weights."""


@dataclass(frozen=True)
class Cost:
    """Of one part of the model."""

    flops: float
    """Of a token's forward pass."""
    weights: int
    """Numbers that the part holds in all."""


def embedding_cost(config: ModelConfig, vocab_size: int) -> Cost:
    """The embedding, whose look-up costs nothing."""
    return Cost(0.0, vocab_size * config.width)


def head_cost(config: ModelConfig, vocab_size: int) -> Cost:
    """The output projection and the norm before it; where it is tied, the weights count again."""
    weights = vocab_size * config.width
    return Cost(2.0 * weights, weights + config.width)


def layer_cost(config: ModelConfig, number: int, seq_len: int) -> Cost:
    """One layer, in a sequence of `seq_len`."""
    matrices, norms = attention_weights(config)
    flops = 2.0 * (matrices + _attention_pairs(config) * seq_len / 2)
    weights = matrices + norms + 2 * config.width
    if number < config.dense_layers:
        dense = 3 * config.width * config.dense_width
        return Cost(flops + 2.0 * dense, weights + dense)
    expert = expert_weights(config)
    router, moe = config.width * config.moe.experts, config.moe
    visited = router + expert * (moe.top_k + moe.shared_experts)
    held = router + expert * (moe.experts + moe.shared_experts)
    return Cost(flops + 2.0 * visited, weights + held)


def count_weights(config: ModelConfig, vocab_size: int) -> int:
    """Weights of the whole model; a tied embedding counts once."""
    held = sum(layer_cost(config, number, 1).weights for number in range(config.layers))
    head = config.width if config.tie_embeddings else head_cost(config, vocab_size).weights
    return held + head + embedding_cost(config, vocab_size).weights


def expert_weights(config: ModelConfig) -> int:
    """Weights of one routed expert."""
    return 3 * config.width * config.moe.expert_width


def attention_weights(config: ModelConfig) -> tuple[int, int]:
    """Weights of one attention layer: of its matrices, and of its norms."""
    shape, heads, width = config.attention, config.heads, config.width
    if shape.kind == "gqa":
        return width * config.head_dim * (2 * heads + 2 * (shape.kv_heads or heads)), 0
    query_dim = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    query = shape.q_lora_rank * (width + query_dim) if shape.q_lora_rank else width * query_dim
    key_value = width * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    key_value += shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    matrices = query + key_value + heads * shape.v_head_dim * width
    return matrices, shape.q_lora_rank + shape.kv_lora_rank


def _attention_pairs(config: ModelConfig) -> int:
    """Multiply-adds of one attention layer for one pair of query and key."""
    shape, heads = config.attention, config.heads
    if shape.kind == "gqa":
        return 2 * heads * config.head_dim
    return heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim)
