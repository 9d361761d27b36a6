"""The MoE layer over an expert-parallel group: dispatch, the experts of this rank, combine.

Dispatch and combine are each other's backward. The gradient of y goes out to the owners as rows,
the experts differentiate, and the gradient of x comes back summed, with that of the router's
weights, which the owner computed on unweighted rows. What a backward needs of a plan is kept from
the forward. With keep="fetch" the memory of the received rows is given up after the forward, and
the rows are dispatched again before the gradient of y.

Gradients of expert weights are sums over the tokens of all ranks: right for a loss that is a sum
over ranks.

Letters: R ranks, T tokens of this rank, K experts per token, E experts, E_l of them here, H width,
I expert width, N rows received.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmoe_kernels.errors import KernelError
from nmoe_kernels.experts import run_experts
from nmoe_kernels.hardware import dtype_name, pick_backend
from nmoe_kernels.rdep.counters import Mark
from nmoe_kernels.rdep.group import ExpertParallel
from nmoe_kernels.rdep.plan import SourcePlan, plan_source
from nmoe_kernels.rdep.transports import Delivery
from nmoe_kernels.router import Routing


@torch.compiler.disable
def expert_parallel_moe(
    x_TH: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    group: ExpertParallel,
    *,
    backend: str | None = None,
    recompute: bool = False,
    name: str = "",
) -> Tensor:
    """The experts' weighted output y [T, H] in the dtype of x, by all ranks of the group together.

    gate_up [E_l, 2*I, H] and down [E_l, H, I] are this rank's experts. Differentiable in x,
    routing.weights_TK, gate_up and down, like `nmoe_kernels.moe`; every rank must then run the
    backward too, also one without tokens. backend, recompute: as for `moe`. name: the layer's name
    in errors. Raises KernelError: E-RDEP-SHAPE, those of `Transport`, those of `pick_backend`.
    """
    _check(x_TH, routing, gate_up, down, group)
    chosen = pick_backend(backend, x_TH.device.type, x_TH.dtype)
    ids_TK = torch.where(routing.valid_T[:, None], routing.ids_TK, group.shape.experts)
    ids_TK = group.within_capacity(ids_TK, count=not _in_backward())
    trip = _Trip(group, plan_source(ids_TK, group.shape.experts, group.ranks), name)
    wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
    rows_NH, weights_NK = _Dispatch.apply(
        x_TH.contiguous(), routing.weights_TK.to(wide), trip, torch.is_grad_enabled()
    )
    start = group.tally.mark()
    y_NH = run_experts(
        rows_NH,
        trip.delivered.ids_NK,
        weights_NK,
        gate_up,
        down,
        backend=chosen,
        recompute=recompute,
        assignments=trip.delivered.assignments,
    )
    group.tally.add_stage("expert", start)
    y_TH: Tensor = _Combine.apply(y_NH, x_TH.detach(), rows_NH.detach(), trip)
    if trip.fetches and torch.is_grad_enabled():
        rows_NH.untyped_storage().resize_(0)
    return y_TH


@dataclass
class _Trip:
    """One forward of one layer, and what its backward needs to go the same way."""

    group: ExpertParallel
    plan: SourcePlan
    layer: str
    delivery: Delivery | None = None
    experts_began: Mark | None = None

    @property
    def delivered(self) -> Delivery:
        assert self.delivery is not None
        return self.delivery

    @property
    def fetches(self) -> bool:
        """Whether the rows are given up after the forward. Those of `local` are the tokens."""
        return self.group.settings.keep == "fetch" and self.group.transport != "local"


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, trip: _Trip, keep_rows: bool
    ) -> tuple[Tensor, Tensor]:
        link, tally = trip.group.link, trip.group.tally
        with tally.stage("dispatch"):
            rows_NH, weights_NK, trip.delivery = link.dispatch(
                trip.plan, x_TH, weights_TK, trip.layer
            )
            if keep_rows and link.reuses_rows:
                rows_NH = rows_NH.clone()
        ctx.trip = trip
        return rows_NH, weights_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_rows_NH: Tensor, grad_weights_NK: Tensor
    ) -> tuple[Tensor | None, ...]:
        trip: _Trip = ctx.trip
        tally = trip.group.tally
        if trip.experts_began is not None:
            tally.add_stage("expert", trip.experts_began)
        with tally.stage("combine"):
            grad_x, grad_weights = trip.group.link.combine(
                trip.delivered, grad_rows_NH, grad_weights_NK, trip.layer
            )
        return grad_x, grad_weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, x_TH: Tensor, rows_NH: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        if trip.fetches:
            # Saved, so that a replay by activation checkpointing hands over its own rows.
            ctx.save_for_backward(x_TH, rows_NH)
        with trip.group.tally.stage("combine"):
            y_TH, _ = trip.group.link.combine(trip.delivered, y_NH, None, trip.layer)
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        trip: _Trip = ctx.trip
        link, tally = trip.group.link, trip.group.tally
        with tally.stage("dispatch"):
            if trip.fetches:
                # First, since a transport may reuse rows: those of dY are read next.
                _refill(trip, *ctx.saved_tensors)
            rows_NH = link.dispatch_again(trip.delivered, grad_TH.contiguous(), trip.layer)
            if link.reuses_rows:
                # A replay by activation checkpointing dispatches before the experts read these.
                rows_NH = rows_NH.clone()
        trip.experts_began = tally.mark()
        return rows_NH, None, None, None


def _refill(trip: _Trip, x_TH: Tensor, rows_NH: Tensor) -> None:
    """Has the rows sent once more, into the storage that was given up."""
    rows_NH.untyped_storage().resize_(rows_NH.numel() * rows_NH.dtype.itemsize)
    again_NH = trip.group.link.dispatch_again(trip.delivered, x_TH.contiguous(), trip.layer)
    # The same values as before: autograd must not take it for a change.
    rows_NH.data.copy_(again_NH)


def _in_backward() -> bool:
    """Whether a backward runs: then this forward is a replay by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _check(
    x_TH: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, group: ExpertParallel
) -> None:
    shape = group.shape
    if x_TH.dim() != 2 or x_TH.shape[1] != shape.width or x_TH.shape[0] > shape.tokens_max:
        what = f"x has shape {list(x_TH.shape)}"
        _refuse(what, f"make it [at most {shape.tokens_max}, {shape.width}]")
    if x_TH.dtype != shape.dtype or x_TH.device.type != shape.device.type:
        what = f"x is {dtype_name(x_TH.dtype)} on {x_TH.device.type}"
        _refuse(what, f"make it {dtype_name(shape.dtype)} on {shape.device.type}")
    wanted = {
        "routing.ids_TK": (routing.ids_TK, (x_TH.shape[0], shape.slots)),
        "routing.weights_TK": (routing.weights_TK, (x_TH.shape[0], shape.slots)),
        "routing.load_E": (routing.load_E, (shape.experts,)),
        "gate_up": (gate_up, (shape.experts_local, 2 * down.shape[-1], shape.width)),
        "down": (down, (shape.experts_local, shape.width, down.shape[-1])),
    }
    for name, (tensor, fitting) in wanted.items():
        if tensor.shape != fitting:
            _refuse(f"{name} has shape {list(tensor.shape)}", f"make it {list(fitting)}")


def _refuse(what: str, remedy: str) -> None:
    raise KernelError("E-RDEP-SHAPE", f"{what} in an expert-parallel layer", remedy)
