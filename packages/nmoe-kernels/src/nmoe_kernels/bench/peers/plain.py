"""The layer as a PyTorch user would write it: softmax, topk, index_select and `grouped_mm`.

Eager, or the same function under torch.compile. The router's product is in the dtype of x and its
softmax in fp32; weights multiply in the dtype of x.

Letters: T tokens, H width, E experts, K experts per token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe_kernels.bench.peers.layer import PeerLayer
from nmoe_kernels.bench.problem import Problem
from nmoe_kernels.hardware import why_unusable

NOTE = "router's product in the dtype of x; sums of gradients by atomics"

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def why_absent(device: str, dtype: torch.dtype) -> str:
    """Why grouped_mm cannot compute, or ""."""
    return why_unusable("torch", device, dtype) or ""


def why_not_compiled(device: str, dtype: torch.dtype) -> str:
    """The same, or that Inductor has no compiler for this device."""
    if device == "cpu" and not _has_cpp_compiler():
        return "torch.compile needs a C++ compiler here"
    return why_absent(device, dtype)


def eager_layer(problem: Problem) -> PeerLayer:
    """The layer in eager mode."""
    return _layer(problem, plain_moe)


def compiled_layer(problem: Problem) -> PeerLayer:
    """The layer under torch.compile, for these shapes alone."""
    # A shape before this one would otherwise turn this one's sizes into symbols.
    torch.compiler.reset()
    return _layer(problem, torch.compile(plain_moe, dynamic=False))


def choose_experts(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Renormalised softmax weights fp32 [T, K] and ids [T, K] of the best experts."""
    scores, ids_TK = logits_TE.float().softmax(-1).topk(top_k, dim=-1)
    return scores / scores.sum(-1, keepdim=True), ids_TK


def plain_moe(
    x_TH: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """y [T, H] and the ids [T, K]."""
    tokens, width = x_TH.shape
    weights_TK, ids_TK = choose_experts(F.linear(x_TH, router), top_k)
    sorted_M, order_M = ids_TK.flatten().sort()
    experts = torch.arange(gate_up.shape[0], device=x_TH.device)
    ends = torch.searchsorted(sorted_M, experts, right=True, out_int32=True)
    rows = x_TH.index_select(0, order_M // top_k)
    gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=-1)
    y_rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    y_TKH = y_rows.index_select(0, order_M.argsort()).view(tokens, top_k, width)
    return (y_TKH * weights_TK.to(x_TH.dtype).unsqueeze(-1)).sum(1), ids_TK


def _layer(problem: Problem, function: Layer) -> PeerLayer:
    router = problem.router.to(problem.x.dtype).requires_grad_()
    gate_up, down = (w.detach().requires_grad_() for w in (problem.gate_up, problem.down))
    arguments = (router, gate_up, down, problem.shape.top_k)
    return PeerLayer(
        run=lambda x: function(x, *arguments)[0],
        choose=lambda x: function(x, *arguments)[1],
        weights=(router, gate_up, down),
    )


def _has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True
