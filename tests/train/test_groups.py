"""Which ranks share a group, on every layout; a fake backend stands in for the other processes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import make_groups
from torch.testing._internal.distributed.fake_pg import FakeStore

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def members(layout: Layout) -> dict[str, list[int]]:
    """The ranks of each of this rank's groups."""
    dist.init_process_group("fake", store=FakeStore(), rank=layout.rank, world_size=layout.ranks)
    groups = make_groups(layout, CPU)
    found = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "ep", "etp"),
    [
        (2, 1, 1, 1, 1),
        (1, 2, 1, 2, 1),
        (1, 1, 4, 1, 1),
        (2, 2, 2, 4, 1),
        (2, 2, 2, 2, 1),
        (2, 3, 2, 2, 1),
        (1, 4, 1, 4, 1),
        (1, 2, 1, 1, 2),
        (2, 4, 2, 2, 2),
        (2, 4, 1, 1, 4),
    ],
)
def test_each_group_holds_those_who_share_what_it_is_for(
    dp: int, tp: int, pp: int, ep: int, etp: int
) -> None:
    sizes = {"dp": dp, "tp": tp, "pp": pp, "ep": ep, "etp": etp}
    layouts = [Layout(**sizes, rank=rank) for rank in range(dp * tp * pp)]
    for me in layouts:
        found = members(me)
        stage = [other for other in layouts if other.pp_rank == me.pp_rank]
        run = [
            other
            for other in stage
            if other.stage_rank // (ep * etp) == me.stage_rank // (ep * etp)
        ]
        part, place = me.stage_rank % etp, me.stage_rank // etp
        wanted = {
            "stage": stage,
            "data": [other for other in stage if other.tp_rank == me.tp_rank],
            "tensor": [other for other in stage if other.data_rank == me.data_rank],
            "expert": [other for other in run if other.stage_rank % etp == part],
            "expert_tensor": [other for other in run if other.stage_rank // etp == place],
            "replicas": [
                other for other in stage if (other.stage_rank - me.stage_rank) % (ep * etp) == 0
            ],
            "pipeline": [other for other in layouts if other.stage_rank == me.stage_rank],
        }
        ranks = {name: [other.rank for other in group] for name, group in wanted.items()}
        assert found == {name: group for name, group in ranks.items() if len(group) > 1}
