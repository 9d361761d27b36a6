"""The Mixture-of-Experts layer, router included: every backend on the same tokens in one run.

A shape's backends are first compared with the reference in fp64, output and all gradients; one that
is off is reported and not timed. FLOPs are the experts' products alone, 6*T*K*H*I forward and three
times that with the backward.

Letters: T tokens, H width, I expert width, E experts, K experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe_kernels.bench.timing import median_ms, peak_gib
from nmoe_kernels.hardware import BACKENDS, dtype_name, why_unusable
from nmoe_kernels.layer import MoE, moe
from nmoe_kernels.router import RouterConfig
from nmoe_kernels.router.reference import choice_weights

# Rounding of the format, through three products; norm over norm.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer and of its input."""

    tokens: int
    width: int
    expert_width: int
    experts: int
    top_k: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From "T,H,I,E,K". Raises ValueError."""
        return cls(*(int(number) for number in text.split(",")))

    def __str__(self) -> str:
        return ",".join(map(str, vars(self).values()))


DEFAULT_SHAPES = {
    "cuda": [
        Shape(32768, 4096, 1024, 128, 8),
        Shape(32768, 2048, 1024, 64, 8),
        Shape(32768, 2048, 1408, 64, 6),
        Shape(24576, 1536, 256, 128, 8),
        Shape(8192, 7168, 2048, 64, 8),
    ],
    "cpu": [Shape(1024, 256, 128, 16, 4)],
}
ROUTINGS = ("uniform", "zipf", "onehot")


@dataclass
class Measurement:
    """One backend on one shape; times in ms, `None` where it was not timed."""

    shape: str
    routing: str
    dtype: str
    backend: str
    error: float
    """Largest relative error against fp64, over the output and the gradients."""
    forward_ms: float | None = None
    forward_spread_ms: float | None = None
    both_ms: float | None = None
    both_spread_ms: float | None = None
    forward_tflops: float | None = None
    both_tflops: float | None = None
    peak_gib: float | None = None
    note: str = ""


def measure_moe(
    shape: Shape,
    routing: str,
    dtype: torch.dtype,
    device: torch.device,
    backends: Sequence[str] = BACKENDS,
    repeats: int = 20,
) -> Iterator[Measurement]:
    """Verifies and times each usable backend on one shape and routing, one after another."""
    torch.manual_seed(0)
    layer = _skewed_layer(shape, routing, device).to(dtype)
    x = torch.randn(shape.tokens, shape.width, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    found = _verify(layer, x, grad, (str(shape), routing), backends)
    # Only now: what the verification held would count in the peak of memory.
    for measurement in found:
        if not measurement.note:
            _time(measurement, layer, x, grad, shape, repeats)
        yield measurement


def _verify(
    layer: MoE, x: Tensor, grad: Tensor, label: tuple[str, str], backends: Sequence[str]
) -> list[Measurement]:
    """Each backend's error against fp64; a note says why one is not to be timed."""
    dtype, name = x.dtype, dtype_name(x.dtype)
    truth = _outputs(layer, x, grad, "reference", torch.float64)
    found = []
    for backend in backends:
        reason = why_unusable(backend, x.device.type, dtype)
        if reason is not None:
            found.append(Measurement(*label, name, backend, float("nan"), note=reason))
            continue
        got = _outputs(layer, x, grad, backend, dtype)
        error = max(_relative(one, other) for one, other in zip(got, truth, strict=True))
        wrong = f"wrong: the error is above {TOLERANCE[dtype]:g}, not timed"
        note = wrong if error > TOLERANCE[dtype] else ""
        found.append(Measurement(*label, name, backend, error, note=note))
    return found


def _skewed_layer(shape: Shape, routing: str, device: torch.device) -> MoE:
    """A layer whose choice follows a distribution: the bias, which no weight sees, decides."""
    config = RouterConfig(shape.experts, shape.top_k, "sigmoid")
    layer = MoE(shape.width, shape.expert_width, config, device=device)
    layer.reset_parameters(torch.Generator(device).manual_seed(1))
    rank = torch.arange(1, shape.experts + 1, device=device)
    # Scores of unit-scale tokens spread by about 0.2, so these shift the choice as their names say.
    bias = {"uniform": 0.0 * rank, "zipf": -0.2 * rank.log(), "onehot": -10.0 * rank}
    layer.router.bias.copy_(bias[routing])
    return layer


def _outputs(layer: MoE, x: Tensor, grad: Tensor, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of x, router weight, gate_up and down, computed in `dtype`.

    The routing is always that of the layer as it is, so that formats are compared and not choices.
    """
    leaves = (x, layer.router.weight, layer.gate_up, layer.down)
    router_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    x_, router, gate_up, down = (
        leaf.detach().to(router_dtype if leaf is layer.router.weight else dtype).requires_grad_()
        for leaf in leaves
    )
    routing = layer.router(x.detach())
    scores = (x_.to(router_dtype) @ router.t()).sigmoid()
    routing.weights_TK = choice_weights(scores, routing.ids_TK, layer.router.config)
    y = moe(x_, routing, gate_up, down, backend=backend)
    grads = torch.autograd.grad(y, (x_, router, gate_up, down), grad.to(y.dtype))
    return [y.detach(), *grads]


def _relative(got: Tensor, want: Tensor) -> float:
    difference = torch.linalg.vector_norm(got.double() - want.double())
    return float(difference / torch.linalg.vector_norm(want.double()))


def _time(
    found: Measurement, layer: MoE, x: Tensor, grad: Tensor, shape: Shape, repeats: int
) -> None:
    layer.backend = found.backend
    inputs = (x, *layer.parameters())

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        torch.autograd.grad(layer(x)[0], inputs, grad)

    works: list[Callable[[], None]] = [forward, both]
    times = [median_ms(work, x.device, repeats) for work in works]
    (found.forward_ms, found.forward_spread_ms), (found.both_ms, found.both_spread_ms) = times
    flops = 6.0 * shape.tokens * shape.top_k * shape.width * shape.expert_width
    found.forward_tflops = flops / found.forward_ms / 1e9
    found.both_tflops = 3 * flops / found.both_ms / 1e9
    found.peak_gib = peak_gib(both, x.device)
