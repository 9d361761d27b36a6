"""Liger's fused experts (liger-kernel), Triton kernels for bf16 behind a plain PyTorch router.

It has no router of its own, so it gets that of `plain`, and takes our weights as they are. It is
not tuned unless LIGER_FUSED_MOE_AUTOTUNE says so: at the first shape of the table tuning had not
ended after six minutes.
"""

import importlib
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe_kernels.bench.peers.layer import PeerLayer, gpu_refusal, missing
from nmoe_kernels.bench.peers.plain import choose_experts
from nmoe_kernels.bench.problem import Problem

# It reads this when it is imported.
TUNING = os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
NOTE = (
    "router in plain PyTorch; router gradient summed by atomics; reads the host once a call; "
    f"LIGER_FUSED_MOE_AUTOTUNE={TUNING}"
)


def why_absent(device: str, dtype: torch.dtype) -> str:
    """Why it cannot run here, or ""."""
    return gpu_refusal(device, dtype) or missing(("liger_kernel",))


def build(problem: Problem) -> PeerLayer:
    """Its autograd function on the problem's weights."""
    experts = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    top_k = problem.shape.top_k
    router = problem.router.to(problem.x.dtype).requires_grad_()
    gate_up, down = (w.detach().requires_grad_() for w in (problem.gate_up, problem.down))

    def run(x: Tensor) -> Tensor:
        weights, ids = choose_experts(F.linear(x, router), top_k)
        y: Tensor = experts.apply(x, gate_up, down, ids.to(torch.int32), weights.to(x.dtype))
        return y

    return PeerLayer(
        run, lambda x: choose_experts(F.linear(x, router), top_k)[1], (router, gate_up, down)
    )
