"""One rank of a check of the one-sided exchange on GPUs; started by torch.distributed.run.

It takes the name of a check and a transport; rank 0 prints what it found as a line of JSON. The
truth is the layer of one rank that holds all experts, on this rank's own tokens, with the gradients
of the experts summed over ranks. Where there are fewer GPUs than ranks, ranks share them, in turns.
"""

import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from nmoe_kernels import KernelError, moe
from nmoe_kernels.rdep import ExpertParallel, Settings, expert_parallel_moe
from nmoe_kernels.router import Routing
from torch.utils.checkpoint import checkpoint

RANK = int(os.environ["LOCAL_RANK"])
DEVICE = torch.device("cuda", RANK % torch.cuda.device_count())


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Unit normals, the same wherever the seed is."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator)


class Case:
    """A layer of E experts and this rank's tokens."""

    def __init__(self, tokens: int, width: int, inner: int, experts: int, slots: int, kind: str):
        generator = torch.Generator(DEVICE).manual_seed(RANK)
        scores = torch.rand(tokens, experts, device=DEVICE, generator=generator)
        if kind == "zipf":
            scores = scores.log() - torch.arange(1, experts + 1, device=DEVICE).log()
        if kind == "onehot":
            scores = scores + 9.0 * (torch.arange(experts, device=DEVICE) < slots)
        self.ids = scores.topk(slots, dim=-1).indices
        self.weights = torch.rand(tokens, slots, device=DEVICE, generator=generator)
        self.x = normal(tokens, width, seed=10 + RANK).bfloat16()
        self.gate_up = normal(experts, 2 * inner, width, seed=1).bfloat16() * width**-0.5
        self.down = normal(experts, width, inner, seed=2).bfloat16() * inner**-0.5
        self.grad = normal(tokens, width, seed=20 + RANK).bfloat16()
        self.experts, self.slots = experts, slots
        self.load = torch.bincount(self.ids.flatten(), minlength=experts)

    def routing(self, weights: torch.Tensor) -> Routing:
        """The choice of this case, as a router gives it."""
        nothing = torch.zeros((), dtype=torch.int64, device=DEVICE)
        return Routing(
            ids_TK=self.ids,
            weights_TK=weights,
            logits_TE=torch.zeros(len(self.ids), self.experts, device=DEVICE),
            score="softmax",
            load_E=self.load,
            invalid=nothing,
            valid_T=torch.ones(len(self.ids), dtype=torch.bool, device=DEVICE),
            dropped=nothing,
        )

    def group(self, transport: str, tokens_max: int, **settings) -> ExpertParallel:
        """An expert-parallel group over all ranks."""
        return ExpertParallel(
            dist.group.WORLD,
            experts=self.experts,
            width=self.x.shape[1],
            slots=self.slots,
            tokens_max=tokens_max,
            dtype=torch.bfloat16,
            device=DEVICE,
            settings=Settings(transport=transport, **{"deadline_s": 60.0, **settings}),
        )

    def own(self) -> slice:
        """This rank's experts."""
        count = self.experts // dist.get_world_size()
        return slice(RANK * count, (RANK + 1) * count)

    def alone(self) -> list[torch.Tensor]:
        """y and the gradients of one rank with all experts; weights' summed over ranks."""
        found = self._run(
            lambda x, weights, gate_up, down: moe(x, self.routing(weights), gate_up, down),
            self.gate_up,
            self.down,
        )
        for grad in found[3:]:
            dist.all_reduce(grad)
        return [*found[:3], *(grad[self.own()] for grad in found[3:])]

    def together(self, group: ExpertParallel, replayed: bool = False) -> list[torch.Tensor]:
        """The same over the group."""

        def layer(x, weights, gate_up, down):
            return expert_parallel_moe(
                x, self.routing(weights), gate_up, down, group, name="tested"
            )

        def saved(*inputs):
            return checkpoint(layer, *inputs, use_reentrant=False)

        return self._run(
            saved if replayed else layer, self.gate_up[self.own()], self.down[self.own()]
        )

    def _run(self, layer, gate_up, down) -> list[torch.Tensor]:
        inputs = [
            tensor.detach().clone().requires_grad_()
            for tensor in (self.x, self.weights, gate_up, down)
        ]
        y = layer(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, self.grad)]


def errors(got, want) -> list[float]:
    """Norm of the difference over the norm, for each."""
    return [
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for a, b in zip(got, want, strict=True)
    ]


def parity(transport: str) -> dict:
    """Output and gradients for token counts, routings and owners of one and of many experts."""
    found = {}
    for tokens in ([0, 0], [0, 1], [777, 4096], [300, 5]):
        for kind in ("uniform", "zipf", "onehot"):
            for experts, slots in ((16, 4), (2, 2), (6, 5)):
                case = Case(tokens[RANK % 2], 512, 256, experts, slots, kind)
                keep = "fetch" if kind == "zipf" else "keep"
                with case.group(transport, max(*tokens, 1), keep=keep) as group:
                    got = case.together(group, replayed=kind == "onehot")
                    group.check()
                found[f"{tokens} {kind} {experts} {slots}"] = max(errors(got, case.alone()))
    return found


def repeated(transport: str) -> dict:
    """A hundred runs with random delays: bitwise the first."""
    case, delays = Case(1000 + 77 * RANK, 1024, 256, 32, 8, "uniform"), random.Random(RANK)
    different = 0
    with case.group(transport, 2000) as group:
        first = case.together(group)
        for _ in range(100):
            torch.cuda._sleep(delays.randrange(2_000_000))
            time.sleep(delays.random() * 2e-3)
            again = case.together(group)
            different += not all(map(torch.equal, first, again))
        group.check()
    return {"different": different}


def layers(transport: str) -> dict:
    """Two layers of different shapes in turns, both in flight before the backward of either."""
    cases = [Case(500, 512, 256, 16, 4, "uniform"), Case(90, 1024, 128, 8, 2, "zipf")]
    groups = [case.group(transport, 500) for case in cases]
    inputs = [case.x.clone().requires_grad_() for case in cases]
    results = []
    for _ in range(2):
        outputs = [
            expert_parallel_moe(
                x,
                case.routing(case.weights),
                case.gate_up[case.own()],
                case.down[case.own()],
                group,
            )
            for case, group, x in zip(cases, groups, inputs, strict=True)
        ]
        results += torch.autograd.grad(outputs, inputs, [case.grad for case in cases])
    wanted = [case.alone()[1] for case in cases] * 2
    for group in groups:
        group.check()
        group.close()
    return {"error": max(errors(results, wanted))}


def captured(transport: str) -> dict:
    """Forward and backward from a captured graph, with inputs that change."""
    case = Case(256, 512, 256, 16, 4, "uniform")
    with case.group(transport, 256) as group:
        own = (case.gate_up[case.own()].requires_grad_(), case.down[case.own()].requires_grad_())
        x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
        inputs = (x, weights, *own)

        def layer():
            y = expert_parallel_moe(x, case.routing(weights), *own, group)
            return [y, *torch.autograd.grad(y, inputs, case.grad)]

        for _ in range(3):
            layer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            given = layer()
        same = []
        for seed in range(5):
            with torch.no_grad():
                x.copy_(normal(*x.shape, seed=100 * seed + RANK))
            graph.replay()
            replayed = [tensor.clone() for tensor in given]
            same.append(all(map(torch.equal, replayed, layer())))
        group.check()
    return {"same": all(same)}


def beside(transport: str) -> dict:
    """Other work beside the exchange: the same results bitwise, and how much of it was hidden."""
    case = Case(2048, 2048, 512, 16, 4, "uniform")
    weight = (normal(2048, 2048, seed=5).bfloat16() * 2048**-0.5).requires_grad_()
    results = []
    with case.group(transport, 2048) as group:
        x = case.x.clone().requires_grad_()
        inputs = (x, weight)

        def work(x):
            # Long enough to be at work when the rows are sent, however slow the host is.
            torch.cuda._sleep(20_000_000)
            return x @ weight

        def routed():
            own = (case.gate_up[case.own()], case.down[case.own()])
            return expert_parallel_moe(x, case.routing(case.weights), *own, group, name="tested")

        for _ in range(5):
            join = group.start_beside(work, x)
            y = routed() + join()
            results.append([y, *torch.autograd.grad(y, inputs, case.grad)])
            y = routed() + work(x)
            results.append([y, *torch.autograd.grad(y, inputs, case.grad)])
        counters = group.counters()
        group.check()
    same = [all(map(torch.equal, results[0], other)) for other in results]
    return {"same": all(same), "hidden": counters.hidden_ms / counters.exchange_ms}


def late(transport: str) -> dict:
    """Rank 1 comes four seconds late: within the deadline, and past it."""
    case, found = Case(64, 256, 128, 4, 2, "uniform"), {}
    for deadline_s in (60.0, 1.0):
        with case.group(transport, 64, deadline_s=deadline_s) as group:
            case.together(group)
            torch.cuda.synchronize()
            if RANK == 1:
                time.sleep(4)
            started_s = time.monotonic()
            try:
                case.together(group)
                torch.cuda.synchronize()
                group.check()
                found[str(deadline_s)] = ""
            except KernelError as error:
                found[str(deadline_s)] = str(error)
            found[f"{deadline_s} took"] = time.monotonic() - started_s
    return found


def soak(transport: str) -> dict:
    """Two thousand steps with shapes that change: memory stays flat, results right to the end."""
    shapes = [Case(tokens, 512, 128, 16, 4, "uniform") for tokens in (1, 300, 64, 777, 0)]
    used = []
    with shapes[0].group(transport, 777) as group:
        for step in range(2000):
            shapes[step % len(shapes)].together(group)
            if step % 500 == 499:
                torch.cuda.synchronize()
                used.append(torch.cuda.memory_allocated())
        error = max(errors(shapes[3].together(group), shapes[3].alone()))
        group.check()
    groups = []
    for _ in range(20):
        with shapes[0].group(transport, 777) as group:
            shapes[1].together(group)
        free, _total = torch.cuda.mem_get_info()
        groups.append(free)
    return {"used": used, "error": error, "free": groups}


def main() -> None:
    """Runs the checks that are named."""
    torch.cuda.set_device(DEVICE)
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        # NCCL wants a GPU for each rank.
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=DEVICE)
    found = {}
    for name in sys.argv[2].split(","):
        started_s = time.monotonic()
        found[name] = globals()[name](sys.argv[1])
        found[name]["seconds"] = time.monotonic() - started_s
    if RANK == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
