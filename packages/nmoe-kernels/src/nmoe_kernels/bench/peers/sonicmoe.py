"""SonicMoE (sonic-moe): CuTe DSL kernels of QuACK, with a router of its own.

It wants an expert's gate and up rows in turns, which is done once here. Its metadata asks for an
older torch than it needs, so it is installed without its dependencies.
"""

import importlib

import torch
from torch import Tensor

from nmoe_kernels.bench.peers.layer import PeerLayer, gpu_refusal, missing
from nmoe_kernels.bench.problem import Problem

NOTE = "router in bf16; without gradients it stores no pre-activation"


def why_absent(device: str, dtype: torch.dtype) -> str:
    """Why it cannot run here, or ""."""
    refusal = gpu_refusal(device, dtype) or missing(("sonicmoe", "quack", "cutlass"))
    if not refusal and torch.cuda.get_device_capability()[0] not in (9, 10):
        return "it needs a GPU of capability 9.0 or 10.0"
    return refusal


def build(problem: Problem) -> PeerLayer:
    """Its fused layer: softmax over the chosen logits, which is the renormalised softmax."""
    sonic = importlib.import_module("sonicmoe.functional")
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    experts, top_k = problem.shape.experts, problem.shape.top_k
    router = problem.router.to(problem.x.dtype).requires_grad_()
    gate_up = in_turns(problem.gate_up.detach()).requires_grad_()
    down = problem.down.detach().requires_grad_()

    def run(x: Tensor) -> Tensor:
        y: Tensor = sonic.moe_TC_softmax_topk_layer(
            x,
            router,
            gate_up.permute(1, 2, 0),
            None,
            down.permute(1, 2, 0),
            None,
            top_k,
            torch.cuda.current_stream().cuda_stream,
            swiglu,
            is_inference_mode_enabled=not torch.is_grad_enabled(),
        )[0]
        return y

    def choose(x: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, router).detach()
        topk = sonic.TC_Softmax_Topk_Router_Function
        ids: Tensor = topk.apply(logits, experts, top_k, True, False)[1]
        return ids

    return PeerLayer(run, choose, (router, gate_up, down), lambda r, g, d: (r, in_halves(g), d))


def in_turns(gate_up: Tensor) -> Tensor:
    """[E, 2*I, H] with all gates first -> gate row, up row, gate row, up row, ..."""
    return gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def in_halves(gate_up: Tensor) -> Tensor:
    """The way back."""
    return gate_up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous()
