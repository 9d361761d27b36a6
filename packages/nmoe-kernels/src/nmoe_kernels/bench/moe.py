"""The whole layer, router included: ours by backend, and peers, on the same tokens and weights.

Forward is timed without gradients; "both" is forward and backward with the gradients of x and of
all weights. FLOPs are the experts' products alone, 6*T*K*H*I forward and three times that with the
backward; bytes are those of x, y, the weights and, with the backward, their gradients. The ceiling
is dense products of the same FLOPs: [T*K, H] times [H, 2*I] and [T*K, I] times [I, H].
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nmoe_kernels.bench.gemm import DENSE_NOTE, dense_products
from nmoe_kernels.bench.measure import Contender, Cost, Measurement, measure, relative_error
from nmoe_kernels.bench.peers import PEERS, PeerLayer
from nmoe_kernels.bench.problem import Problem, layer_problem
from nmoe_kernels.bench.shapes import Shape
from nmoe_kernels.hardware import BACKENDS, why_unusable
from nmoe_kernels.layer import MoE


def measure_moe(
    shape: Shape,
    routing: str,
    dtype: torch.dtype,
    device: torch.device,
    backends: Sequence[str] = BACKENDS,
    peers: Sequence[str] = (),
    repeats: int = 20,
) -> list[Measurement]:
    """Verifies and times each usable backend and peer on one shape and routing."""
    problem = layer_problem(shape, routing, dtype, device)
    contenders = [layer_contender(name, problem) for name in (*backends, *peers)]
    contenders.append(_dense(problem))
    return measure(contenders, costs(shape, dtype), (str(shape), routing), dtype, device, repeats)


def layer_contender(name: str, problem: Problem) -> Contender:
    """A backend or a peer by name, on a problem; one that cannot run says why."""
    device, dtype = problem.x.device.type, problem.x.dtype
    if name in BACKENDS:
        absent, note = why_unusable(name, device, dtype) or "", ""
    else:
        absent, note = PEERS[name].why_absent(device, dtype), PEERS[name].note
    if absent:
        return Contender(name, absent=absent)
    try:
        layer = _ours(name, problem) if name in BACKENDS else PEERS[name].build(problem)
    except Exception as failure:  # an import of a peer may raise anything
        return Contender(name, absent=f"cannot be set up: {type(failure).__name__}: {failure}")
    return _contender(name, layer, problem, note)


def costs(shape: Shape, dtype: torch.dtype) -> dict[str, Cost]:
    """What each pass must do."""
    flops = 6.0 * shape.rows * shape.width * shape.expert_width
    weights = 3.0 * shape.experts * shape.width * shape.expert_width
    tokens = 1.0 * shape.tokens * shape.width
    size = dtype.itemsize
    return {
        "forward": Cost(flops, size * (weights + 2 * tokens)),
        # Forward; then weights, x and the gradient of y are read, and three gradients are written.
        "both": Cost(3 * flops, size * (3 * weights + 5 * tokens)),
    }


def _contender(name: str, layer: PeerLayer, problem: Problem, note: str) -> Contender:
    x, inputs = problem.x, (problem.x, *layer.weights)

    def forward() -> Tensor:
        with torch.no_grad():
            return layer.run(x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer.run(x), inputs, problem.grad)

    def error() -> float:
        with torch.no_grad():
            ids = layer.choose(x)
        outputs = layer.outputs(x, problem.grad)
        # Without gradients a layer may take another path.
        apart = relative_error([forward()], outputs[:1])
        return max(problem.error(ids, outputs), apart)

    held = sum(tensor.nbytes for tensor in (*inputs, problem.grad))
    return Contender(name, {"forward": forward, "both": both}, error, held, note=note)


def _ours(backend: str, problem: Problem) -> PeerLayer:
    shape, dtype = problem.shape, problem.x.dtype
    layer = MoE(
        shape.width, shape.expert_width, problem.config, backend=backend, device="meta", dtype=dtype
    )
    layer.router.weight = nn.Parameter(problem.router)
    layer.router.bias = torch.zeros(shape.experts, device=problem.x.device)
    layer.gate_up, layer.down = nn.Parameter(problem.gate_up), nn.Parameter(problem.down)
    return PeerLayer(
        run=lambda x: layer(x)[0],
        choose=lambda x: layer.router(x, backend).ids_TK,
        weights=(layer.router.weight, layer.gate_up, layer.down),
    )


def _dense(problem: Problem) -> Contender:
    """Products of the layer's sizes with one weight for all rows, forward and backward."""
    products, held = dense_products(problem.shape, problem.x)

    def forward() -> None:
        for name in ("up", "down"):
            products[name]()

    def both() -> None:
        for product in products.values():
            product()

    passes = {"forward": forward, "both": both}
    return Contender("dense", passes, held_bytes=held, note=DENSE_NOTE, is_ceiling=True)
