"""The layout of a run: how many ranks in each dimension, and which of them this process is.

Data parallelism splits every batch over dp ranks that hold the same dense weights. Expert
parallelism cuts the dp ranks into runs of ep consecutive ranks; each run holds all experts once,
E / ep of them a rank, so rank r holds those of its place r mod ep, and the dp / ep ranks of one
place hold the same ones. This module is plain arithmetic: it needs no process group and no torch.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nmoe_train.config import Config
from nmoe_train.errors import TrainError


@dataclass(frozen=True)
class Layout:
    """Sizes of the dimensions and this process's place in them."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    rank: int = 0
    local_rank: int = 0
    """Place among the processes of this host."""
    local_ranks: int = 1
    """Processes of this host."""

    @property
    def ranks(self) -> int:
        """Processes of the run: dp * tp * pp, as ep folds over dp * tp."""
        return self.dp * self.tp * self.pp

    @property
    def data_rank(self) -> int:
        """Which share of every batch this process computes, 0 .. dp-1."""
        return self.rank // (self.tp * self.pp)

    @property
    def expert_rank(self) -> int:
        """Which share of the experts this process holds, 0 .. ep-1."""
        return self.rank % self.ep

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts as this one, itself included."""
        return self.ranks // self.ep

    @property
    def writes_experts(self) -> bool:
        """Whether this process is the first of those that hold its experts."""
        return self.rank < self.ep

    def local_experts(self, experts: int) -> range:
        """Numbers of the experts that this process holds, of `experts` in all."""
        held = experts // self.ep
        return range(self.expert_rank * held, (self.expert_rank + 1) * held)

    def sizes(self) -> dict[str, int]:
        """The four sizes by name, for run.json and checkpoints."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}


def current_layout(config: Config, environment: Mapping[str, str] = os.environ) -> Layout:
    """The layout of this process, from the configuration and torchrun's environment.

    `parallel.dp` left out is the number of processes. Raises TrainError (`E-LAYOUT`) when sizes,
    experts, batch and processes do not fit, naming the nearest that do.
    """
    check_layout(config)
    processes = _number("WORLD_SIZE", 1, environment)
    dp, ep = config.parallel.dp or processes, config.parallel.ep
    if processes != dp:
        raise _problem(
            f"parallel.dp = {dp} asks for {_count(dp, 'process', 'processes')}, "
            f"and {processes} started",
            f"start `torchrun --nproc-per-node {dp} -m nmoe_train run ...`, "
            f"or set parallel.dp to {processes} or leave it out",
        )
    _check_sizes(config, dp)
    rank = _number("RANK", 0, environment)
    return Layout(
        dp=dp,
        ep=ep,
        rank=rank,
        local_rank=_number("LOCAL_RANK", rank, environment),
        local_ranks=_number("LOCAL_WORLD_SIZE", processes, environment),
    )


def check_layout(config: Config) -> None:
    """Refuses what no number of processes makes possible; needs no torchrun.

    Raises TrainError (`E-LAYOUT`), naming the nearest possible layout.
    """
    parallel, experts = config.parallel, config.model.moe.experts
    for name, meaning in (("tp", "tensor"), ("pp", "pipeline")):
        size = getattr(parallel, name)
        if size != 1:
            raise _problem(
                f"parallel.{name} = {size}, and {meaning} parallelism does not exist yet",
                f"set parallel.{name} to 1; parallel.dp and parallel.ep spread the work today",
            )
    if experts % parallel.ep:
        possible = _nearest(parallel.ep, _divisors(experts))
        raise _problem(
            f"parallel.ep = {parallel.ep} does not divide the {experts} experts of a layer",
            f"the nearest that do are {possible}",
        )
    if parallel.ep > 1 and parallel.rdep.transport == "local":
        raise _problem(
            f"parallel.rdep.transport = 'local' is for one rank, and parallel.ep = {parallel.ep}",
            "leave the transport out to have one picked, or set parallel.ep to 1",
        )
    if parallel.dp is not None:
        _check_sizes(config, parallel.dp)


def _check_sizes(config: Config, dp: int) -> None:
    """Whether experts and batch can be spread over `dp` ranks."""
    ep, train = config.parallel.ep, config.train
    if dp % ep:
        possible = _nearest(ep, _divisors(dp) & _divisors(config.model.moe.experts))
        raise _problem(
            f"parallel.ep = {ep} does not divide parallel.dp = {dp}, over whose ranks it folds",
            f"the nearest ep that do are {possible}; or start a multiple of {ep} processes",
        )
    if train.batch_size % dp:
        below = train.batch_size // dp * dp
        possible = _nearest(train.batch_size, {below, below + dp} - {0})
        raise _problem(
            f"train.batch_size = {train.batch_size} does not divide over {dp} ranks",
            f"the nearest that do are {possible}",
        )
    share = train.batch_size // dp
    if train.micro_batch_size is not None and share % train.micro_batch_size:
        raise _problem(
            f"a rank's {share} sequences do not divide into micro-batches of "
            f"train.micro_batch_size = {train.micro_batch_size}",
            f"the nearest that do are {_nearest(train.micro_batch_size, _divisors(share))}",
        )


def _divisors(number: int) -> set[int]:
    return {size for size in range(1, number + 1) if number % size == 0}


def _nearest(wanted: int, possible: Iterable[int]) -> str:
    """The possible sizes next to the wanted one, as "2 and 4"."""
    below = [size for size in possible if size < wanted]
    above = [size for size in possible if size > wanted]
    return " and ".join(
        str(size) for size in (max(below, default=0), min(above, default=0)) if size
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _number(name: str, default: int, environment: Mapping[str, str]) -> int:
    value = environment.get(name, str(default))
    if not value.isdecimal():
        raise _problem(
            f"the environment's {name} is {value!r}",
            "start with torchrun, which sets it, or unset it",
        )
    return int(value)


def _problem(what: str, remedy: str) -> TrainError:
    return TrainError("E-LAYOUT", what, remedy)
