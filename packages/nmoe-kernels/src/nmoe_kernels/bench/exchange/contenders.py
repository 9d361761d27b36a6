"""What is timed: our transports, and what others do, with permute and unpermute.

Each gives a dispatch and a combine that can be repeated, and a round trip to verify. `all_to_all`
does what is usual: rows in the order of experts, one for every assignment, counts first, which the
host reads; the receiver brings rows into the order of its experts, and back. `vdev2d` is torch's
`all_to_all_vdev_2d` over NVSHMEM, which takes the counts on the device and brings rows into the
order of experts itself.

Letters: R ranks, T tokens, K experts per token, E experts, H width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from nmoe_kernels.bench.exchange.problem import Exchange
from nmoe_kernels.rdep import ExpertParallel, Settings
from nmoe_kernels.rdep.plan import plan_source


@dataclass
class Contender:
    """dispatch, combine, plan: works. round_trip: y [T, H] of weighted identity experts.

    blocks: multiprocessors that move rows, None where it does not say.
    """

    name: str
    dispatch: Callable[[], object]
    combine: Callable[[], object]
    round_trip: Callable[[], Tensor]
    plan: Callable[[], object] | None = None
    blocks: int | None = None


def open_group(problem: Exchange, transport: str, deadline_s: float = 120.0) -> ExpertParallel:
    """An expert-parallel group over all ranks for this problem."""
    shape = problem.shape
    # The transport's name is checked by the settings.
    settings = Settings(transport=transport, deadline_s=deadline_s)  # type: ignore[arg-type]
    return ExpertParallel(
        dist.group.WORLD,
        experts=shape.experts,
        width=shape.width,
        slots=shape.top_k,
        tokens_max=shape.tokens,
        dtype=problem.x.dtype,
        device=problem.x.device,
        settings=settings,
    )


def ours(problem: Exchange, group: ExpertParallel, blocks: int | None) -> Contender:
    """One of our transports. blocks: how many multiprocessors it may use, where it can be told."""
    link, experts = group.link, problem.shape.experts
    plan = plan_source(problem.ids, experts, group.ranks)

    def use() -> None:
        if blocks is not None:
            # Of those transports that say how many they may use.
            link.blocks = blocks  # type: ignore[attr-defined]

    def dispatch() -> object:
        use()
        return link.dispatch(plan, problem.x, problem.weights, "bench")

    use()
    rows, weights, delivery = link.dispatch(plan, problem.x, problem.weights, "bench")
    rows, weights = rows.clone(), weights.clone()

    def combine() -> object:
        use()
        return link.combine(delivery, rows, None, "bench")

    def round_trip() -> Tensor:
        use()
        got, by_slot, sent = link.dispatch(plan, problem.x, problem.weights, "bench")
        used = (sent.ids_NK >= 0).any(1, keepdim=True)
        y = torch.where(used, got.double() * by_slot.double().sum(1, keepdim=True), 0.0)
        return link.combine(sent, y.to(got.dtype), None, "bench")[0]

    name = group.transport if blocks is None else f"{group.transport}, {blocks} blocks"
    planned = partial(plan_source, problem.ids, experts, group.ranks)
    return Contender(name, dispatch, combine, round_trip, planned, blocks)


class AllToAll:
    """The exchange by all_to_all_single of the process group's backend."""

    def __init__(self, problem: Exchange) -> None:
        self._problem = problem
        self._ranks = dist.get_world_size()
        self._own = problem.shape.experts // self._ranks

    def dispatch(self) -> Tensor:
        """Rows in the order of this rank's experts."""
        shape, flat = self._problem.shape, self._problem.ids.flatten()
        self._order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=shape.experts).view(self._ranks, self._own)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        both = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
        self._sent, self._received = both
        rows = self._problem.x[self._order // shape.top_k]
        got = rows.new_empty(sum(self._received), shape.width)
        dist.all_to_all_single(got, rows, self._received, self._sent)
        expert = torch.arange(self._own, device=rows.device).repeat(self._ranks)
        experts = expert.repeat_interleave(theirs.flatten(), output_size=len(got))
        self._permuted = torch.argsort(experts, stable=True)
        self.rows = got[self._permuted]
        return self.rows

    def combine(self) -> Tensor:
        """The weighted sum of the rows at their tokens."""
        problem, shape = self._problem, self._problem.shape
        back = torch.empty_like(self.rows)
        back[self._permuted] = self.rows
        rows = back.new_empty(len(self._order), shape.width)
        dist.all_to_all_single(rows, back, self._sent, self._received)
        flat = torch.empty_like(rows)
        flat[self._order] = rows
        by_slot = flat.view(shape.tokens, shape.top_k, shape.width)
        return torch.einsum("tkh,tk->th", by_slot, problem.weights.to(rows.dtype))

    def round_trip(self) -> Tensor:
        """Dispatch and combine."""
        self.dispatch()
        return self.combine()


def all_to_all(problem: Exchange) -> Contender:
    """The peer of every MoE without kernels for its exchange."""
    peer = AllToAll(problem)
    peer.dispatch()
    backend = "nccl" if problem.x.is_cuda else "gloo"
    return Contender(f"all_to_all, {backend}", peer.dispatch, peer.combine, peer.round_trip)


class AllToAllOnDevice:
    """The exchange by torch's `all_to_all_vdev_2d`, whose counts stay on the device."""

    def __init__(self, problem: Exchange) -> None:
        shape, group = problem.shape, dist.group.WORLD
        assert group is not None
        self._problem, self._name = problem, group.group_name
        ranks, assignments = group.size(), shape.tokens * shape.top_k

        def memory(*size: int, dtype: torch.dtype) -> Tensor:
            tensor = symmetric.empty(*size, dtype=dtype, device=problem.x.device)
            symmetric.rendezvous(tensor, group)
            return tensor

        dtype = problem.x.dtype
        self._rows, self._back = (memory(assignments, shape.width, dtype=dtype) for _ in "ab")
        # The most that can come: every assignment of every rank.
        self.received = memory(ranks * assignments, shape.width, dtype=dtype)
        self._counts = memory(shape.experts, dtype=torch.int64)
        self._places, self._back_places = (
            memory(2, shape.experts, dtype=torch.int64) for _ in "ab"
        )

    def dispatch(self) -> Tensor:
        """Rows in the order of this rank's experts."""
        shape, flat = self._problem.shape, self._problem.ids.flatten()
        self._order = torch.argsort(flat, stable=True)
        counts = torch.zeros_like(self._counts)
        self._counts.copy_(counts.scatter_add_(0, flat, torch.ones_like(flat)))
        torch.index_select(self._problem.x, 0, self._order // shape.top_k, out=self._rows)
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self._rows, self.received, self._counts, self._places, self._name, 1
        )
        return self.received

    def combine(self) -> Tensor:
        """The weighted sum of the rows at their tokens."""
        problem, shape = self._problem, self._problem.shape
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self.received, self._back, self._places, self._back_places, self._name
        )
        flat = torch.empty_like(self._back)
        flat[self._order] = self._back
        by_slot = flat.view(shape.tokens, shape.top_k, shape.width)
        return torch.einsum("tkh,tk->th", by_slot, problem.weights.to(flat.dtype))

    def round_trip(self) -> Tensor:
        """Dispatch and combine."""
        self.dispatch()
        return self.combine()


def all_to_all_on_device(problem: Exchange) -> Contender:
    """The peer whose host does not wait."""
    peer = AllToAllOnDevice(problem)
    peer.dispatch()
    return Contender("vdev2d", peer.dispatch, peer.combine, peer.round_trip)
