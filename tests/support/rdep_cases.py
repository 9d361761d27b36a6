"""What the ranks of a group do in the tests of expert parallelism; run by `rdep_ranks`.

Every function takes its rank and the group's folder, and returns what the test looks at.
"""

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nmoe_kernels import KernelError, MoE, RouterConfig
from nmoe_kernels.experts import run_experts
from nmoe_kernels.rdep import ExpertParallel, Settings, expert_parallel_moe
from nmoe_kernels.rdep import layer as rdep_layer
from nmoe_kernels.rdep.plan import plan_source
from nmoe_kernels.rdep.transports import collective, p2p
from rdep_inputs import INNER, WIDTH, Problem, as_routing, make_problem, share
from rdep_ranks import Refusal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Nine deadlines: ranks that wait longer than that for a bad one do not heed theirs.
PATIENCE_S = 90.0


def open_group(
    experts: int, slots: int, dtype: torch.dtype, width: int = WIDTH, **settings: Any
) -> ExpertParallel:
    """A group over all processes, with room for the largest share of the tests."""
    settings.setdefault("deadline_s", 200.0)
    return ExpertParallel(
        dist.group.WORLD,
        experts=experts,
        width=width,
        slots=slots,
        tokens_max=4096,
        dtype=dtype,
        device="cpu",
        settings=Settings(**settings),
    )


def run_layer(problem: Problem, group: ExpertParallel, **options: Any) -> dict[str, Tensor]:
    """The output and every gradient of this rank's share."""
    parts = {name: getattr(problem, name) for name in ("x", "weights", "gate_up", "down")}
    leaves = {name: part.clone().requires_grad_() for name, part in parts.items()}
    routing = as_routing(problem.ids, leaves["weights"], group.shape.experts)
    weights = (leaves["gate_up"], leaves["down"])
    y = expert_parallel_moe(leaves["x"], routing, *weights, group, **options)
    y.backward(problem.grad)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def parity(rank: int, folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Each case on this group: problem, settings of the group and options of the layer."""
    answers = []
    for case in cases:
        tokens, options = case["problem"]["tokens"], case.get("options", {})
        problem = share(make_problem(**case["problem"]), tokens, rank)
        sizes = (case["problem"]["experts"], problem.ids.shape[1], problem.x.dtype)
        with open_group(*sizes, **case.get("settings", {})) as group:
            answers.append(run_layer(problem, group, **options))
    return answers


def moved(rank: int, folder: Path, problem: dict[str, Any]) -> dict[str, Any]:
    """What a transport hands over, and what it brings back, without any expert."""
    mine = share(make_problem(**problem), problem["tokens"], rank)
    experts = problem["experts"]
    with open_group(experts, problem["slots"], mine.x.dtype) as group:
        plan = plan_source(mine.ids, experts, group.ranks)
        rows, weights, delivery = group.link.dispatch(plan, mine.x, mine.weights, "")
        again = group.link.dispatch_again(delivery, 2 * mine.x, "")
        sums, weights_back = group.link.combine(delivery, rows, weights, "")
    return {
        "rows": rows, "weights": weights, "ids": delivery.ids_NK, "again": again,
        "assignments": delivery.assignments, "sums": sums, "weights back": weights_back,
    }  # fmt: skip


def repeated(rank: int, folder: Path, problem: dict[str, Any], times: int) -> list[dict[str, Any]]:
    """The same layer again and again, with ranks that come at random moments."""
    mine = share(make_problem(**problem), problem["tokens"], rank)
    delays = random.Random(rank)
    with open_group(problem["experts"], problem["slots"], mine.x.dtype) as group:
        answers = []
        for _ in range(times):
            time.sleep(0.02 * delays.random())
            answers.append(run_layer(mine, group))
    return answers


class Network(nn.Module):
    """Three MoE layers of two shapes: two of width H after each other, one wider, in `dtype`."""

    def __init__(self, groups: tuple[ExpertParallel, ExpertParallel] | None, replay: bool) -> None:
        super().__init__()
        first, last = groups or (None, None)
        config, wide = (
            RouterConfig(8, 3, "sigmoid"),
            RouterConfig(4, 1, "softmax", renormalise=False),
        )
        self.replay = replay
        self.layers = nn.ModuleList(
            [MoE(WIDTH, INNER, config, expert_parallel=first, name=f"layer {n}") for n in (0, 1)]
        )
        self.widen = nn.Linear(WIDTH, WIDTH + 8)
        self.last = MoE(WIDTH + 8, INNER, wide, expert_parallel=last, name="last")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.call(layer, x)
        return self.call(self.last, self.widen(x))

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        y, _ = checkpoint(layer, x, use_reentrant=False) if self.replay else layer(x)
        return y


def whole_network() -> Network:
    """The network with all experts, weights drawn."""
    generator = torch.Generator().manual_seed(5)
    network = Network(None, replay=False)
    with torch.no_grad():
        for parameter in network.parameters():
            width = parameter.shape[-1]
            parameter.copy_(width**-0.5 * torch.randn(parameter.shape, generator=generator))
        for layer in (*network.layers, network.last):
            layer.router.bias.zero_()
    return network


def load_share(network: nn.Module, whole: nn.Module, rank: int, ranks: int) -> None:
    """Copies what this rank has of the whole network's weights: its own experts."""
    wanted = whole.state_dict()
    for name, value in network.state_dict().items():
        source = wanted[name]
        if value.shape != source.shape:
            source = source.chunk(ranks)[rank]
        value.copy_(source)


def network(
    rank: int, folder: Path, batches: list[list[int]], keep: str, replay: bool
) -> dict[str, Any]:
    """Outputs and gradients of the network, accumulated over batches."""
    with (
        open_group(8, 3, torch.float32, keep=keep) as first,
        open_group(4, 1, torch.float32, WIDTH + 8, keep=keep) as last,
    ):
        mine = Network((first, last), replay)
        load_share(mine, whole_network(), rank, dist.get_world_size())
        outputs, inputs = [], []
        for number, tokens in enumerate(batches):
            x, grad = (part.split(tokens)[rank] for part in network_batch(tokens, number))
            x = x.clone().requires_grad_()
            y = mine(x)
            y.backward(grad)
            outputs.append(y.detach())
            inputs.append(x.grad)
        grads = {name: parameter.grad for name, parameter in mine.named_parameters()}
        return {"y": outputs, "x": inputs, "grads": grads}


def network_batch(tokens: list[int], number: int) -> tuple[Tensor, Tensor]:
    """All ranks' tokens of one batch and the gradient of the output."""
    generator = torch.Generator().manual_seed(100 + number)
    total = sum(tokens)
    x = torch.randn(total, WIDTH, generator=generator)
    return x, torch.randn(total, WIDTH + 8, generator=generator)


def fetched_memory(rank: int, folder: Path) -> dict[str, Any]:
    """Bytes of the received rows after the forward and after the backward, by way of keeping."""
    sizes, tokens = {}, [20, 30]
    problem = share(make_problem(tokens, 4, 2, "uniform", torch.float32), tokens, rank)
    rows: list[Tensor] = []

    def watched(x_NH: Tensor, *arguments: Any, **options: Any) -> Tensor:
        rows.append(x_NH.detach())
        return run_experts(x_NH, *arguments, **options)

    rdep_layer.run_experts = watched
    for keep in ("keep", "fetch"):
        with open_group(4, 2, torch.float32, keep=keep) as group:
            x = problem.x.clone().requires_grad_()
            routing = as_routing(problem.ids, problem.weights, 4)
            y = expert_parallel_moe(x, routing, problem.gate_up, problem.down, group)
            after_forward = rows[-1].untyped_storage().size()
            y.sum().backward()
            sizes[keep] = (after_forward, rows[-1].untyped_storage().size(), rows[-1].nbytes)
    rdep_layer.run_experts = run_experts
    return sizes


def capacity(rank: int, folder: Path, tokens: list[int], overflow: str) -> dict[str, Any]:
    """One MoE with a tight capacity: its routing, what was counted, and what check says."""
    config = RouterConfig(8, 3, "sigmoid")
    x = torch.randn(sum(tokens), WIDTH, generator=torch.Generator().manual_seed(9))
    settings = Settings(capacity=0.5, overflow=overflow, deadline_s=200.0)
    with ExpertParallel(
        dist.group.WORLD,
        experts=8,
        width=WIDTH,
        slots=3,
        tokens_max=max(tokens),
        dtype=torch.float32,
        device="cpu",
        settings=settings,
    ) as group:
        layer = MoE(WIDTH, INNER, config, expert_parallel=group)
        whole = MoE(WIDTH, INNER, config)
        whole.reset_parameters(torch.Generator().manual_seed(3))
        load_share(layer, whole, rank, dist.get_world_size())
        y, routing = layer(x.split(tokens)[rank])
        refusals = [attempt(group.check), attempt(group.check)]
        counters = group.counters()
        replayed, _ = checkpoint(layer, x.split(tokens)[rank], use_reentrant=False)
        replayed.sum().backward()
        replays = group.counters().since(counters)
    return {
        "y": y.detach(), "routing": routing, "refusals": refusals, "counters": counters,
        "replays": replays,
    }  # fmt: skip


def odd_inputs(rank: int, folder: Path) -> dict[str, Any]:
    """What a rank may meet: bad rows, no gradient wanted, autocast, a closed group."""
    config, answers = RouterConfig(4, 2, "sigmoid"), {}
    with open_group(4, 2, torch.float32) as group:
        layer = MoE(WIDTH, INNER, config, expert_parallel=group)
        layer.reset_parameters(torch.Generator().manual_seed(rank))
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))
        x[2] = float("nan") if rank == 0 else 1.0
        x.requires_grad_()
        y, _ = layer(x)
        y.sum().backward()
        answers["bad row"] = (y.detach(), x.grad, layer.gate_up.grad, layer.router.weight.grad)
        with torch.no_grad():
            answers["no grad"] = torch.equal(layer(x)[0], y)
        before = group.counters()
        layer.zero_grad()
        layer(x.detach())[0].sum().backward()
        answers["frozen input"] = layer.down.grad.isfinite().all()
        answers["since"] = group.counters().since(before)
        # The backend whose products autocast would change.
        layer.backend = "reference"
        plain = layer(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            answers["autocast"] = torch.equal(layer(x)[0], plain)
        answers["p2p"] = attempt(lambda: open_group(4, 2, torch.float32, transport="p2p"))
        answers["local"] = attempt(lambda: open_group(4, 2, torch.float32, transport="local"))
        on_gpu = dataclasses.replace(group.shape, device=torch.device("cuda", 0))
        odd_one = dataclasses.replace(on_gpu, tokens_max=64 + rank)
        answers["sizes"] = [p2p.why_unusable(s, dist.group.WORLD) for s in (on_gpu, odd_one)]
    answers["closed"] = attempt(lambda: layer(x))
    return answers


def attempt(action: Callable[[], object]) -> Refusal | None:
    """What an action is refused with."""
    try:
        action()
    except KernelError as error:
        return Refusal(error.code, str(error))
    return None


def bad_peer(
    rank: int, folder: Path, bad: list[int], how: str, deadline_s: float, seconds: float = 0.0
) -> Any:
    """One good layer, then one in which the `bad` ranks are late, die, or go astray."""
    tokens = [5 + r for r in range(dist.get_world_size())]
    problem = share(make_problem(tokens, 12, 3, "uniform", torch.float32), tokens, rank)
    with open_group(12, 3, torch.float32) as group:
        run_layer(problem, group, name="warm")
    with open_group(12, 3, torch.float32, deadline_s=deadline_s) as group:
        if rank in bad:
            misbehave(how, folder, bad, seconds, group, problem)
        try:
            answer = run_layer(problem, group, name="up 7")
        finally:
            (folder / f"over-{rank}").touch()
        return answer, group.counters()


def misbehave(
    how: str,
    folder: Path,
    bad: list[int],
    seconds: float,
    group: ExpertParallel,
    problem: Problem,
) -> None:
    """What a bad rank does before, or instead of, its part in the layer."""
    if how == "sleeps":
        time.sleep(seconds)
    elif how == "comes too late":
        wait_until_over(folder, bad)
    elif how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "dies in the exchange":
        collective.dist = Replaced(lambda: os.kill(os.getpid(), signal.SIGKILL))
    elif how == "stands still in the exchange":
        collective.dist = Replaced(lambda: wait_until_over(folder, bad))
    elif how == "skips the backward":
        routing = as_routing(problem.ids, problem.weights, 12)
        weights = (problem.gate_up, problem.down)
        expert_parallel_moe(problem.x, routing, *weights, group, name="up 7")
        wait_until_over(folder, bad)
    elif how == "swaps two layers":
        run_layer(problem, group, name="up 8")
    elif how == "is in another layer":
        with open_group(12, 2, torch.float32) as other:
            expert_parallel_moe(
                problem.x,
                as_routing(problem.ids[:, :2], problem.weights[:, :2], 12),
                problem.gate_up,
                problem.down,
                other,
            )


class Replaced:
    """torch.distributed with an all-to-all that does something else first."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    def __getattr__(self, name: str) -> Any:
        if name == "all_to_all_single":
            self.action()
        return getattr(dist, name)


def wait_until_over(folder: Path, bad: list[int]) -> None:
    """Returns when every other rank has ended, well or not, or should have long ago."""
    others = [r for r in range(dist.get_world_size()) if r not in bad]
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        if all((folder / f"over-{r}").exists() for r in others):
            return
        time.sleep(0.05)
