"""How often the host waits for the GPU in one layer, counted in a trace of the profiler.

Counted are the calls of the CUDA runtime and driver that return only when the device has done
something, in a forward and a backward of an expert-parallel layer.
"""

import torch
from torch.profiler import ProfilerActivity, profile

from nmoe_kernels.bench.exchange.problem import Exchange
from nmoe_kernels.rdep import ExpertParallel, expert_parallel_moe
from nmoe_kernels.router import Routing

WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
)
EXPERT_WIDTH = 256


def host_waits(problem: Exchange, group: ExpertParallel) -> int:
    """Waits of the host in a forward and a backward of one layer, on CUDA."""
    shape, device, dtype = problem.shape, problem.x.device, problem.x.dtype
    own = group.experts_local
    weights = [
        (torch.randn(own, *size, device=device) * size[1] ** -0.5).to(dtype).requires_grad_()
        for size in ((2 * EXPERT_WIDTH, shape.width), (shape.width, EXPERT_WIDTH))
    ]
    x = problem.x.clone().requires_grad_()
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    routing = Routing(
        ids_TK=problem.ids,
        weights_TK=problem.weights.clone().requires_grad_(),
        logits_TE=torch.zeros(shape.tokens, shape.experts, device=device),
        score="softmax",
        load_E=torch.zeros(shape.experts, dtype=torch.int64, device=device),
        invalid=nothing,
        valid_T=torch.ones(shape.tokens, dtype=torch.bool, device=device),
        dropped=nothing,
    )

    def layer() -> None:
        y = expert_parallel_moe(x, routing, *weights, group, name="bench")
        torch.autograd.grad(y, (x, routing.weights_TK, *weights), torch.ones_like(y))

    for _ in range(2):
        layer()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        layer()
        # Outside of what is counted: the profiler itself waits when it stops.
        with torch.profiler.record_function("after the layer"):
            pass
    end = next(
        event.time_range.start for event in trace.events() if event.name == "after the layer"
    )
    torch.cuda.synchronize()
    return sum(event.name in WAITS and event.time_range.start < end for event in trace.events())
