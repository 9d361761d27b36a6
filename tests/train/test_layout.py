"""Sizes and torchrun's environment say who this process is, or a line says what would fit."""

from collections.abc import Callable
from typing import Any

import pytest
from nmoe_train.config import Config
from nmoe_train.errors import TrainError
from nmoe_train.parallel import Layout, check_layout, current_layout

Tiny = Callable[..., Config]
INTERLEAVED = {"parallel.pipeline.schedule": "interleaved", "parallel.pipeline.chunks": 2}


def started(processes: int, rank: int = 0, local_rank: int | None = None) -> dict[str, str]:
    """What torchrun tells a process; two hosts share the processes where local_rank is given."""
    local = processes if local_rank is None else processes // 2
    place = rank if local_rank is None else local_rank
    numbers = {
        "WORLD_SIZE": processes,
        "RANK": rank,
        "LOCAL_RANK": place,
        "LOCAL_WORLD_SIZE": local,
    }
    return {name: str(number) for name, number in numbers.items()}


def refusal(function: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(TrainError) as caught:
        function(*arguments)
    assert caught.value.code == "E-LAYOUT"
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def wide(tiny: Tiny) -> Tiny:
    """A configuration of 12 experts and batches of 24 sequences."""
    return lambda **overrides: tiny(
        **{"model.moe.experts": 12, "train.batch_size": 24, **overrides}
    )


def test_a_process_alone_is_the_whole_run(tiny: Tiny) -> None:
    assert current_layout(tiny(), {}) == Layout()
    assert current_layout(tiny(), started(1)) == Layout()


def test_data_parallelism_follows_from_the_processes(wide: Tiny) -> None:
    layout = current_layout(wide(**{"parallel.ep": 3}), started(6, rank=4))
    assert layout == Layout(dp=6, ep=3, rank=4, local_rank=4, local_ranks=6)
    assert (layout.ranks, layout.data_rank) == (6, 4)
    assert layout.sizes() == {"dp": 6, "tp": 1, "pp": 1, "ep": 3}
    other_host = current_layout(wide(**{"parallel.dp": 6}), started(6, rank=4, local_rank=1))
    assert (other_host.rank, other_host.local_rank, other_host.local_ranks) == (4, 1, 3)


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6), (72, 36)])
def test_every_expert_is_held_once_by_each_run_of_ep_ranks(dp: int, ep: int) -> None:
    experts = 2 * ep
    layouts = [Layout(dp=dp, ep=ep, rank=rank) for rank in range(dp)]
    for first in range(0, dp, ep):
        group = layouts[first : first + ep]
        held = [number for layout in group for number in layout.local_experts(experts)]
        assert held == list(range(experts))
    assert [layout.rank for layout in layouts if layout.writes_experts] == list(range(ep))
    for layout in layouts:
        same = [other for other in layouts if other.expert_rank == layout.expert_rank]
        assert layout.expert_replicas == len(same)


def test_ranks_count_through_tensor_then_data_then_pipeline_parallelism() -> None:
    layouts = [Layout(dp=2, tp=3, pp=2, ep=6, rank=rank) for rank in range(12)]
    places = [(each.pp_rank, each.data_rank, each.tp_rank) for each in layouts]
    assert places == [(p, d, t) for p in range(2) for d in range(2) for t in range(3)]
    assert [each.stage_rank for each in layouts] == [*range(6), *range(6)]
    assert {each.ranks for each in layouts} == {12}
    assert [each.rank for each in layouts if each.speaks_for_share] == [0, 3]


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_experts_fold_over_data_and_tensor_parallelism_of_each_stage(ep: int) -> None:
    layouts = [Layout(dp=2, tp=3, pp=2, ep=ep, rank=rank) for rank in range(12)]
    for first in range(0, 12, ep):
        held = [number for each in layouts[first : first + ep] for number in each.local_experts(12)]
        assert held == list(range(12))
    assert {each.expert_replicas for each in layouts} == {6 // ep}
    writers = [each.rank for each in layouts if each.writes_experts]
    assert writers == [*range(ep), *range(6, 6 + ep)]


@pytest.mark.parametrize(("etp", "ep"), [(1, 4), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1)])
def test_neighbours_split_experts_and_runs_of_them_hold_all(etp: int, ep: int) -> None:
    layouts = [Layout(dp=2, tp=4, pp=2, ep=ep, etp=etp, rank=rank) for rank in range(16)]
    for first in range(0, 16, ep * etp):
        run = layouts[first : first + ep * etp]
        for part in range(etp):
            held = [number for each in run[part::etp] for number in each.local_experts(8)]
            assert held == list(range(8))
    writers = [each.rank for each in layouts if each.writes_experts]
    assert writers == [*range(ep * etp), *range(8, 8 + ep * etp)]
    assert {each.expert_replicas for each in layouts} == {8 // (ep * etp)}
    assert layouts[0].sizes().get("etp", 1) == etp


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            {"parallel.etp": 2},
            "etp = 2 does not divide parallel.tp = 1, over whose ranks it folds; the nearest that "
            "do are 1",
        ),
        (
            {"parallel.tp": 2, "parallel.etp": 2, "model.moe.expert_width": 17},
            "etp = 2 does not divide width 17, of an expert; the nearest that do are 1",
        ),
        (
            {"parallel.tp": 2, "parallel.etp": 2, "parallel.dp": 3, "parallel.ep": 2},
            "ep = 2 does not divide parallel.dp * tp / etp = 3 * 2 / 2, over whose ranks it folds; "
            "the nearest ep that do are 1 and 3; or make parallel.dp a multiple of 2",
        ),
        (
            {"parallel.tp": 2, "parallel.etp": 2, "parallel.rdep.capacity": 1.5},
            "rdep.capacity = 1.5 bounds what an expert takes from one rank, and with parallel.etp "
            "= 2 tokens come from several at once; leave the capacity out",
        ),
        (
            {"parallel.tp": 4},
            "tp = 4 does not divide the 2 heads of attention; the nearest that do",
        ),
        (
            {
                "parallel.tp": 4,
                "model.heads": 8,
                "model.attention.kind": "gqa",
                "model.attention.kv_heads": 2,
            },
            "tp = 4 does not divide the 2 key-value heads of attention; the nearest that do are 2",
        ),
        (
            {"parallel.tp": 2, "parallel.dp": 3, "parallel.ep": 4},
            "ep = 4 does not divide parallel.dp * tp = 3 * 2, over whose ranks it folds; the "
            "nearest ep that do are 3 and 6; or make parallel.dp a multiple of 2",
        ),
        ({"parallel.pp": 4}, "= 4 runs of layers, in a model of 2 layers; the nearest pp that has"),
        ({"parallel.pp": 4}, "has a layer for each is 2"),
        (
            {"parallel.pp": 2, "model.layers": 5, **INTERLEAVED, "parallel.pipeline.chunks": 3},
            "parallel.pp * chunks = 2 * 3 runs of layers, in a model of 5 layers; the nearest pp "
            "that has a layer for each is 1, or set parallel.pipeline.chunks to 2 at most",
        ),
        (
            {"parallel.pp": 4, "model.layers": 4, **INTERLEAVED, "parallel.pipeline.chunks": 6},
            "runs of layers, in a model of 4 layers; with parallel.pipeline.chunks = 2 the nearest "
            "pp that has is 2",
        ),
        *(
            (
                {"parallel.pp": 2, "model.layers": n, **INTERLEAVED, "parallel.pipeline.chunks": 4},
                f"{n} layers; leave schedule and chunks out, and set parallel.pp to {n} at most",
            )
            for n in (1, 2, 3)
        ),
        (
            {"parallel.pp": 2, "parallel.pipeline.schedule": "interleaved"},
            "parallel.pipeline.chunks = 1 with the schedule interleaved; set chunks to 2 or more",
        ),
        (
            {"parallel.pp": 2, "parallel.pipeline.chunks": 2, "model.layers": 4},
            "chunks = 2 with the schedule 1f1b; set the schedule to interleaved, or leave chunks",
        ),
        (
            {
                "parallel.pp": 2,
                "parallel.fsdp": True,
                "parallel.pipeline.schedule": "zero-bubble",
            },
            "set parallel.pipeline.schedule to 1f1b or interleaved, or parallel.fsdp to false",
        ),
        (
            {"parallel.pp": 2, "parallel.pipeline.split": [1, 2]},
            "lists 2 numbers that sum to 3; list 2 numbers that sum to the 2 layers, or leave it",
        ),
        (
            {"parallel.pp": 2, "parallel.pipeline.split": [2]},
            "lists 1 numbers that sum to 2; list 2 numbers that sum to the 2 layers, or leave it",
        ),
        (
            {
                "parallel.pp": 2,
                "parallel.dp": 2,
                "model.layers": 4,
                **INTERLEAVED,
                "train.micro_batch_size": 4,
            },
            "2 stages takes a multiple of 2 micro-batches, and train.micro_batch_size = 4 makes 3 "
            "of a rank's 12 sequences; the nearest sizes that do are 3 and 6",
        ),
        (
            {"parallel.pp": 2, "parallel.dp": 8, "model.layers": 4, **INTERLEAVED},
            "makes 1 of a rank's 3 sequences; make train.batch_size a multiple of 16",
        ),
        (
            {"parallel.dp": 5},
            "24 does not divide over 5 data-parallel ranks; the nearest that do are 20 and 25, and "
            "it divides over 4 and 6",
        ),
        (
            {"train.micro_batch_size": 5},
            "24 sequences do not divide into micro-batches of train.micro_batch_size = 5; the "
            "nearest that do are 4 and 6",
        ),
        (
            {"model.layers": 4, "parallel.pp": 2, **INTERLEAVED},
            "2 stages takes a multiple of 2 micro-batches, and train.micro_batch_size = 24 makes 1 "
            "of a rank's 24 sequences; the nearest sizes that do are 12",
        ),
        ({"parallel.ep": 5}, "divide the 12 experts of a layer; the nearest that do are 4 and 6"),
        ({"parallel.ep": 24}, "divide the 12 experts of a layer; the nearest that do are 12"),
        ({"parallel.ep": 2, "parallel.rdep.transport": "local"}, "for one rank, and parallel.ep ="),
        (
            {"parallel.ep": 3, "parallel.dp": 4},
            "parallel.dp = 4, over whose ranks it folds; the nearest ep that do are 2 and 4; or "
            "make parallel.dp a multiple of 3",
        ),
        (
            {"parallel.ep": 4, "parallel.dp": 2},
            "parallel.dp = 2, over whose ranks it folds; the nearest ep that do are 2; or",
        ),
    ],
)
def test_what_no_number_of_processes_makes_possible_is_refused_by_validate_and_at_the_start(
    wide: Tiny, sets: dict[str, Any], says: str
) -> None:
    config = wide(**sets)
    assert says in refusal(check_layout, config)
    parallel = config.parallel
    processes = (parallel.dp or 24 // parallel.pp) * parallel.pp
    assert says in refusal(current_layout, config, started(processes))


@pytest.mark.parametrize(
    ("sets", "processes", "says"),
    [
        ({"parallel.dp": 4}, 2, "dp = 4 asks for 4 processes, and 2 started; start `torchrun --np"),
        ({"parallel.dp": 4}, 1, "or set parallel.dp to 1 or leave it out"),
        ({"parallel.dp": 1}, 2, "dp = 1 asks for 1 process, and 2 started"),
        (
            {"parallel.dp": 4, "parallel.tp": 2},
            6,
            "parallel.dp = 4 * tp = 2 asks for 8 processes, and 6 started; start `torchrun "
            "--nproc-per-node 8 -m nmoe_train run ...`, or set parallel.dp to 3 or leave it out",
        ),
        ({"parallel.tp": 2}, 3, "tp = 2 does not divide the 3 processes that started; start a mul"),
        ({}, 5, "24 does not divide over 5 data-parallel ranks; the nearest that do are 20 and 25"),
        ({}, 5, "are 20 and 25, and it divides over 4 and 6"),
        ({}, 48, "48 data-parallel ranks; the nearest that do are 48, and it divides over 24"),
        ({"parallel.ep": 2}, 3, "dp = 3, over whose ranks it folds; the nearest ep that do are 1"),
        (
            {"train.micro_batch_size": 8},
            2,
            "12 sequences do not divide into micro-batches of train.micro_batch_size = 8; the "
            "nearest that do are 6 and 12",
        ),
    ],
)
def test_what_does_not_fit_the_processes_is_refused_at_the_start(
    wide: Tiny, sets: dict[str, Any], processes: int, says: str
) -> None:
    config = wide(**sets)
    check_layout(config)
    assert says in refusal(current_layout, config, started(processes))


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["one", "", "-1", "1.0"])
def test_a_number_of_torchruns_that_is_none_is_refused_and_named(
    tiny: Tiny, name: str, value: str
) -> None:
    assert f"{name} is {value!r}" in refusal(current_layout, tiny(), {**started(1), name: value})


def test_one_stage_takes_no_notice_of_a_schedule(tiny: Tiny) -> None:
    config = tiny(**INTERLEAVED, **{"parallel.pipeline.split": [1, 1, 3]})
    assert current_layout(config, {}) == Layout()
