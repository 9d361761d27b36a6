"""The Mixture-of-Experts layer: route, group, expert MLP, as a function and as a module.

Weights lie as in nn.Linear, (out, in), experts first: gate_up [E, 2*I, H] holds an expert's gate
rows, then its up rows; down is [E, H, I]. An output is sum over k of weight[t, k] *
down_e(silu(gate_e(x)) * up_e(x)), summed in fp32 in slot order and cast to the dtype of x.

Letters: T tokens, K experts per token, E experts, H width, I expert width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nmoe_kernels.errors import KernelError
from nmoe_kernels.experts import run_experts
from nmoe_kernels.hardware import pick_backend
from nmoe_kernels.rdep import ExpertParallel, expert_parallel_moe
from nmoe_kernels.router import RouterConfig, Routing, route


def moe(
    x_TH: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    *,
    backend: str | None = None,
    recompute: bool = False,
) -> Tensor:
    """The experts' weighted output y [T, H] in the dtype of x.

    Differentiable in x, routing.weights_TK, gate_up [E, 2*I, H] and down [E, H, I]; weights of
    another dtype are cast to that of x, and autocast changes nothing. A row that the router found
    invalid gives 0 and takes no gradient. backend: one of `hardware.BACKENDS`, or None to pick.
    recompute: all but reference keep no pre-activation for the backward and compute it again.
    Raises KernelError: E-MOE-SHAPE, or those of `pick_backend`.
    """
    _check(x_TH, routing, gate_up, down)
    name = pick_backend(backend, x_TH.device.type, x_TH.dtype)
    experts = gate_up.shape[0]
    # Grouped as dropped, a bad row costs neither arithmetic nor a cleaned copy of x.
    ids_TK = torch.where(routing.valid_T[:, None], routing.ids_TK, experts)
    return run_experts(
        x_TH, ids_TK, routing.weights_TK, gate_up, down, backend=name, recompute=recompute
    )


class Router(nn.Module):
    """The router's state: `weight` [E, H], and the buffer `bias` [E] that `update_bias` moves.

    Both stay in fp32 when the model is cast to bf16 or fp16.
    """

    bias: Tensor

    def __init__(
        self, width: int, config: RouterConfig, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.experts, width)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32))
        self.register_buffer("bias", torch.zeros(config.experts, device=device))

    def forward(self, x_TH: Tensor, backend: str | None = None) -> Routing:
        """Routes tokens [T, H] on the backend that `route` picks, or on the one asked for."""
        return route(x_TH, self.weight, self.config, self.bias, backend=backend)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            half = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if half else moved

        return super()._apply(keep_precision, recurse)


class MoE(nn.Module):
    """A layer of E SwiGLU experts behind a router.

    Parameters `router.weight` fp32 [E, H], `gate_up` [E, 2*I, H], `down` [E, H, I]; buffer
    `router.bias` fp32 [E]. With `expert_parallel`, gate_up and down hold this rank's E_l experts
    only, in order, and every rank of the group runs the layer together; `name` is what errors call
    it. Memory is left as it was allocated, but for the bias: call `reset_parameters`, or fill it.
    """

    def __init__(
        self,
        width: int,
        expert_width: int,
        router: RouterConfig,
        *,
        backend: str | None = None,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        expert_parallel: ExpertParallel | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        self.backend, self.recompute = backend, recompute
        self.expert_parallel, self.name = expert_parallel, name
        self.router = Router(width, router, device)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        experts = router.experts if expert_parallel is None else expert_parallel.experts_local
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * expert_width, width, **options))
        self.down = nn.Parameter(torch.empty(experts, width, expert_width, **options))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws each weight from a normal of standard deviation 1 / sqrt(inputs); bias 0."""
        with torch.no_grad():
            for weight in (self.router.weight, self.gate_up, self.down):
                weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
            self.router.bias.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x [..., H] -> (y [..., H], the routing of its tokens in order)."""
        x_TH = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TH, self.backend)
        options: dict[str, Any] = {"backend": self.backend, "recompute": self.recompute}
        group = self.expert_parallel
        if group is None:
            y_TH = moe(x_TH, routing, self.gate_up, self.down, **options)
        else:
            routing = group.limit(routing, self.router.config, self.router.bias)
            y_TH = expert_parallel_moe(
                x_TH, routing, self.gate_up, self.down, group, name=self.name, **options
            )
        return y_TH.reshape(x.shape), routing


def _check(x_TH: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> None:
    for name, tensor, dims in (("x", x_TH, 2), ("gate_up", gate_up, 3), ("down", down, 3)):
        if tensor.dim() != dims:
            what = f"{name} has shape {list(tensor.shape)}"
            raise KernelError("E-MOE-SHAPE", what, f"give it {dims} dimensions")
    tokens, width = x_TH.shape
    experts, _, expert_width = down.shape
    wanted = {
        "routing.ids_TK": (routing.ids_TK, (tokens, routing.ids_TK.shape[-1])),
        "routing.weights_TK": (routing.weights_TK, tuple(routing.ids_TK.shape)),
        "routing.load_E": (routing.load_E, (experts,)),
        "gate_up": (gate_up, (experts, 2 * expert_width, width)),
        "down": (down, (experts, width, expert_width)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            what = f"{name} has shape {list(tensor.shape)} beside x {list(x_TH.shape)}"
            raise KernelError("E-MOE-SHAPE", what, f"make it {list(shape)}")
