"""The layout of a run: how many ranks in each dimension, and which of them this process is.

Ranks count through tensor parallelism first, then data, then pipeline stages: rank = (pp_rank * dp
+ dp_rank) * tp + tp_rank. The pipeline cuts the layers into pp stages of dp * tp ranks. In a stage,
data parallelism splits every batch over dp shares, and the tp neighbours of a share split its
sequences and the dense weights. Expert tensor parallelism lets etp neighbours of those split the
width of every expert. Expert parallelism cuts a stage's ranks into runs of ep * etp consecutive
ones; each run holds all experts once, E / ep of them in each etp neighbours, so the rank at place r
of its stage holds part r mod etp of those of (r // etp) mod ep, and ranks at the same place of
other runs hold the same. This module is plain arithmetic: it needs no process group and no torch.
"""

import math
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
    etp: int = 1
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
    def stage_ranks(self) -> int:
        """Processes of one pipeline stage."""
        return self.dp * self.tp

    @property
    def pp_rank(self) -> int:
        """Which pipeline stage this process computes, 0 .. pp-1."""
        return self.rank // self.stage_ranks

    @property
    def stage_rank(self) -> int:
        """Place among the processes of its stage, 0 .. dp*tp-1."""
        return self.rank % self.stage_ranks

    @property
    def data_rank(self) -> int:
        """Which share of every batch this process computes, 0 .. dp-1."""
        return self.stage_rank // self.tp

    @property
    def tp_rank(self) -> int:
        """Which part of its share's sequences and dense weights this process holds, 0 .. tp-1."""
        return self.rank % self.tp

    @property
    def expert_rank(self) -> int:
        """Which share of its stage's experts this process holds, 0 .. ep-1."""
        return self.stage_rank // self.etp % self.ep

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same parts of the same experts as this one, itself included."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def writes_experts(self) -> bool:
        """Whether this process is the first of those that hold its part of its experts."""
        return self.stage_rank < self.ep * self.etp

    @property
    def first_with_output(self) -> int:
        """The first rank of the last stage, which has the model's output."""
        return (self.pp - 1) * self.stage_ranks

    def peer(self, stage: int) -> int:
        """The rank at this one's place of another pipeline stage."""
        return stage * self.stage_ranks + self.stage_rank

    @property
    def speaks_for_share(self) -> bool:
        """Whether this process is the first of those that have its share of the batch."""
        return self.pp_rank == 0 and self.tp_rank == 0

    def local_experts(self, experts: int) -> range:
        """Numbers of the experts that this process holds, of `experts` in all."""
        held = experts // self.ep
        return range(self.expert_rank * held, (self.expert_rank + 1) * held)

    def sizes(self) -> dict[str, int]:
        """The four sizes by name, for run.json and checkpoints; and etp where experts are split."""
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}
        return sizes if self.etp == 1 else {**sizes, "etp": self.etp}


def current_layout(config: Config, environment: Mapping[str, str] = os.environ) -> Layout:
    """The layout of this process, from the configuration and torchrun's environment.

    `parallel.dp` left out is the processes that tp and pp leave. Raises TrainError (`E-LAYOUT`)
    when sizes, experts, batch and processes do not fit, naming the nearest that do.
    """
    check_layout(config)
    processes = _number("WORLD_SIZE", 1, environment)
    parallel = config.parallel
    dp = _data_parallel(config, processes)
    _check_sizes(config, dp)
    rank = _number("RANK", 0, environment)
    return Layout(
        dp=dp,
        tp=parallel.tp,
        pp=parallel.pp,
        ep=parallel.ep,
        etp=parallel.etp,
        rank=rank,
        local_rank=_number("LOCAL_RANK", rank, environment),
        local_ranks=_number("LOCAL_WORLD_SIZE", processes, environment),
    )


def check_layout(config: Config) -> None:
    """Refuses what no number of processes makes possible; needs no torchrun.

    Raises TrainError (`E-LAYOUT`), naming the nearest possible layout.
    """
    parallel, experts = config.parallel, config.model.moe.experts
    _check_heads(config)
    _check_expert_widths(config)
    _check_stages(config)
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
    else:
        # What one share cannot be cut into, parts of it cannot either.
        check_shares(config, 1)


def _data_parallel(config: Config, processes: int) -> int:
    """Size of data parallelism on so many processes."""
    parallel = config.parallel
    others = parallel.tp * parallel.pp
    if parallel.dp is None and processes % others == 0:
        return processes // others
    asked = (parallel.dp or max(1, processes // others)) * others
    if processes == asked:
        assert parallel.dp is not None
        return parallel.dp
    sizes = {"dp": parallel.dp, "tp": parallel.tp, "pp": parallel.pp}
    named = [f"{n} = {size}" for n, size in sizes.items() if size and (n == "dp" or size > 1)]
    if parallel.dp is None:
        raise _problem(
            f"parallel.{' * '.join(named)} does not divide the {processes} processes that started",
            f"start a multiple of {others}, or choose sizes whose product divides {processes}",
        )
    remedy = (
        f"or set parallel.dp to {processes // others} or leave it out"
        if processes % others == 0
        else "or choose other sizes"
    )
    raise _problem(
        f"parallel.{' * '.join(named)} asks for {_count(asked, 'process', 'processes')}, "
        f"and {processes} started",
        f"start `torchrun --nproc-per-node {asked} -m nmoe_train run ...`, {remedy}",
    )


def _check_heads(config: Config) -> None:
    """Whether every tensor-parallel rank gets as many heads."""
    tp, heads = config.parallel.tp, config.model.heads
    kinds = {"heads": heads}
    if config.model.attention.kind == "gqa":
        kinds["key-value heads"] = config.model.attention.kv_heads or heads
    possible = set.intersection(*(_divisors(count) for count in kinds.values()))
    for kind, count in kinds.items():
        if count % tp:
            raise _problem(
                f"parallel.tp = {tp} does not divide the {count} {kind} of attention",
                f"the nearest that do are {_nearest(tp, possible)}",
            )


def _check_expert_widths(config: Config) -> None:
    """Whether neighbours can split every expert evenly."""
    parallel, width = config.parallel, config.model.moe.expert_width
    possible = _divisors(parallel.tp) & _divisors(width)
    for what, size in ((f"parallel.tp = {parallel.tp}", parallel.tp), (f"width {width}", width)):
        if size % parallel.etp:
            of = "over whose ranks it folds" if size is parallel.tp else "of an expert"
            raise _problem(
                f"parallel.etp = {parallel.etp} does not divide {what}, {of}",
                f"the nearest that do are {_nearest(parallel.etp, possible)}",
            )
    if parallel.etp > 1 and parallel.rdep.capacity != "exact":
        raise _problem(
            f"parallel.rdep.capacity = {parallel.rdep.capacity:g} bounds what an expert takes from "
            f"one rank, and with parallel.etp = {parallel.etp} tokens come from several at once",
            "leave the capacity out, or set parallel.etp to 1",
        )


def _check_stages(config: Config) -> None:
    """Whether every pipeline stage gets as many runs of layers as its schedule wants."""
    pp, pipeline, layers = config.parallel.pp, config.parallel.pipeline, config.model.layers
    if pp == 1:
        return
    if config.parallel.fsdp and pipeline.schedule == "zero-bubble":
        raise _problem(
            "parallel.fsdp gathers a layer's weights for one backward, and the schedule "
            "zero-bubble makes their gradients in another",
            "set parallel.pipeline.schedule to 1f1b or interleaved, or parallel.fsdp to false",
        )
    chunks, parts = pipeline.chunks, pp * pipeline.chunks
    if (chunks > 1) != (pipeline.schedule == "interleaved"):
        raise _problem(
            f"parallel.pipeline.chunks = {chunks} with the schedule {pipeline.schedule}",
            "set chunks to 2 or more for interleaved, or leave both out"
            if chunks == 1
            else "set the schedule to interleaved, or leave chunks out",
        )
    if parts > layers:
        of = f"parallel.pp = {pp}" if chunks == 1 else f"parallel.pp * chunks = {pp} * {chunks}"
        raise _problem(
            f"{of} runs of layers, in a model of {layers} layers", _fewer_parts(pp, chunks, layers)
        )
    split = pipeline.split
    if split is not None and (len(split) != parts or sum(split) != layers):
        raise _problem(
            f"parallel.pipeline.split lists {len(split)} numbers that sum to {sum(split)}",
            f"list {parts} numbers that sum to the {layers} layers, or leave it out",
        )


def _fewer_parts(pp: int, chunks: int, layers: int) -> str:
    """The nearest numbers of stages, and of runs on each, that have a layer for each."""
    stages, most = _nearest(pp, range(1, layers // chunks + 1)), layers // pp
    remedies = [f"the nearest pp that has a layer for each is {stages}"] if stages else []
    if chunks > 1 and most > 1:
        remedies.append(f"set parallel.pipeline.chunks to {most} at most")
    if not remedies and layers < 4:
        # With two stages of two runs each, four layers are the fewest.
        return f"leave schedule and chunks out, and set parallel.pp to {layers} at most"
    if not remedies:
        possible = _nearest(pp, range(1, layers // 2 + 1))
        remedies = [f"with parallel.pipeline.chunks = 2 the nearest pp that has is {possible}"]
    return ", or ".join(remedies)


def _check_micro_batches(config: Config, dp: int) -> None:
    """Whether an interleaved schedule gets a multiple of pp micro-batches."""
    pp, train, share = config.parallel.pp, config.train, config.train.batch_size // dp
    if pp == 1 or config.parallel.pipeline.schedule != "interleaved":
        return
    size = train.micro_batch_size or share
    if share // size % pp:
        possible = _nearest(size, {n for n in _divisors(share) if share // n % pp == 0})
        raise _problem(
            f"an interleaved pipeline of {pp} stages takes a multiple of {pp} micro-batches, and "
            f"train.micro_batch_size = {size} makes {share // size} of a rank's {share} sequences",
            f"the nearest sizes that do are {possible}"
            if possible
            else f"make train.batch_size a multiple of {dp * pp}",
        )


def _check_sizes(config: Config, dp: int) -> None:
    """Whether experts and batch can be spread over `dp` shares."""
    ep, tp, etp = config.parallel.ep, config.parallel.tp, config.parallel.etp
    if dp * tp // etp % ep:
        possible = _nearest(ep, _divisors(dp * tp // etp) & _divisors(config.model.moe.experts))
        over = f"parallel.dp = {dp}" if tp == 1 else f"parallel.dp * tp = {dp} * {tp}"
        over = over if etp == 1 else f"parallel.dp * tp / etp = {dp} * {tp} / {etp}"
        more = ep // math.gcd(ep, tp // etp)
        raise _problem(
            f"parallel.ep = {ep} does not divide {over}, over whose ranks it folds",
            f"the nearest ep that do are {possible}; or make parallel.dp a multiple of {more}",
        )
    check_shares(config, dp)


def check_shares(config: Config, dp: int) -> None:
    """Whether a batch can be cut into `dp` shares, and these into micro-batches.

    Raises TrainError (`E-LAYOUT`), naming the nearest sizes that can.
    """
    train = config.train
    if train.batch_size % dp:
        below = train.batch_size // dp * dp
        possible = _nearest(train.batch_size, {below, below + dp} - {0})
        raise _problem(
            f"train.batch_size = {train.batch_size} does not divide over {dp} data-parallel ranks",
            f"the nearest that do are {possible}, and it divides over "
            f"{_nearest(dp, _divisors(train.batch_size))}",
        )
    share = train.batch_size // dp
    if train.micro_batch_size is not None and share % train.micro_batch_size:
        raise _problem(
            f"a rank's {share} sequences do not divide into micro-batches of "
            f"train.micro_batch_size = {train.micro_batch_size}",
            f"the nearest that do are {_nearest(train.micro_batch_size, _divisors(share))}",
        )
    _check_micro_batches(config, dp)


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
