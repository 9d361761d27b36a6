"""The MFU's formula against a count by hand and against what torch counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nmoe_train.config import Config
from nmoe_train.model import Transformer, chunked_cross_entropy
from nmoe_train.telemetry import peak_flops, training_flops_per_token
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

Tiny = Callable[..., Config]
LENGTH = 16


def test_mla_by_hand(tiny: Tiny) -> None:
    config = tiny(**{"model.layers": 3, "model.moe.shared_experts": 2})
    # Width 32, 2 heads of 8 + 4 and value 8, latent 12; one dense layer of 48; two with a router
    # over 4 experts of 16, of which 2 are chosen beside 2 shared ones; 257 words.
    query, key_value = 32 * 2 * 12, 32 * (12 + 4) + 12 * 2 * (8 + 8)
    pairs = 2 * (12 + 8) * LENGTH / 2
    attention = query + key_value + 2 * 8 * 32 + pairs
    sparse = 3 * 32 * 16 * (2 + 2) + 32 * 4
    wanted = 6 * (3 * attention + 3 * 32 * 48 + 2 * sparse + 32 * 257)
    assert training_flops_per_token(config.model, 257, LENGTH) == wanted


def test_mla_with_a_query_latent_by_hand(tiny: Tiny) -> None:
    plain, latent = (tiny(**{"model.attention.q_lora_rank": rank}).model for rank in (0, 10))
    difference = training_flops_per_token(latent, 257, 16) - training_flops_per_token(
        plain, 257, 16
    )
    assert difference == 6 * 2 * (32 * 10 + 10 * 24 - 32 * 24)


def test_gqa_by_hand(tiny: Tiny) -> None:
    gqa = {"model.attention.kind": "gqa", "model.attention.kv_heads": 1}
    config = tiny(**gqa, **{"model.attention.head_dim": 10, "model.dense_layers": 2})
    attention = 32 * 20 + 2 * 32 * 10 + 20 * 32 + 2 * (10 + 10) * LENGTH / 2
    wanted = 6 * (2 * attention + 2 * 3 * 32 * 48 + 32 * 257)
    assert training_flops_per_token(config.model, 257, LENGTH) == wanted


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"model.attention.q_lora_rank": 10, "model.moe.shared_experts": 0},
        {"model.attention.kind": "gqa", "model.attention.kv_heads": 1, "model.moe.top_k": 3},
        {"model.layers": 3, "model.dense_layers": 0, "model.tie_embeddings": True},
    ],
)
def test_the_formula_is_what_torch_counts(
    tiny: Tiny,
    build: Callable[..., Transformer],
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict[str, Any],
) -> None:
    # torch does not count grouped_mm; the reference multiplies expert by expert.
    monkeypatch.setenv("NMOE_KERNELS_BACKEND", "reference")
    config = tiny(**overrides)
    model = build(config)
    rows = 3
    tokens = torch.randint(0, 257, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    documents = torch.zeros_like(tokens)
    # Attention as plain products, which alone are batched: aten.bmm counts them and nothing else.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = model.hidden(tokens, documents).hidden_BSH
        loss = chunked_cross_entropy(
            hidden.flatten(0, 1), model.output_weight, tokens.flatten(), chunk=7
        )
        loss.backward()
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    shape, heads, layers = config.model.attention, config.model.heads, config.model.layers
    widths = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
    if shape.kind == "gqa":
        widths = 2 * config.model.width // heads
    assert attention == 3 * 2 * layers * heads * widths * rows * LENGTH**2
    # torch counts all pairs of positions, of which a causal model needs half.
    wanted = counter.get_total_flops() - attention / 2
    formula = training_flops_per_token(config.model, 257, LENGTH) * rows * LENGTH
    assert formula == pytest.approx(wanted, rel=1e-12)


def test_the_peak_is_as_stated_or_unknown_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert peak_flops(cpu, 2.5) == 2.5e12
    assert peak_flops(cpu, None) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Something Else", None),
    ],
)
def test_the_peak_of_a_gpu_goes_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, tflops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    wanted = None if tflops is None else tflops * 1e12
    assert peak_flops(torch.device("cuda"), None) == wanted
