"""What a rank says when something breaks here is told apart from the loss of a peer."""

import pytest
import torch
import torch.distributed as dist
from nmoe_train.errors import TrainError
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups
from torch.distributed import HashStore

PEERS = {
    "[gloo/transport/tcp/pair.cc:7] Connection closed by peer": "found that another rank has left",
    "connect: No route to host": "found that another rank has left",
    "Timed out waiting 5000ms for recv operation": "waited for another rank until its deadline",
    "[third_party/gloo/gloo/transport/tcp/pair.cc:9] unexpected": "failed ([third_party/gloo",
}


@pytest.fixture
def groups() -> Groups:
    return Groups(Layout(dp=2), HashStore())


@pytest.mark.parametrize("said", PEERS)
def test_a_peer_that_is_gone_or_late_is_one_line(groups: Groups, said: str) -> None:
    with pytest.raises(TrainError) as caught, groups.among_peers("in the forward pass"):
        raise RuntimeError(said)
    assert caught.value.code == "E-PEER"
    assert PEERS[said] in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("shape '[2]' is invalid for input of size 3"),
    ],
)
def test_an_error_of_this_rank_stays_what_it_is(groups: Groups, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, groups.among_peers("in the forward pass"):
        raise error
    assert caught.value is error


def test_what_torch_refuses_here_is_no_loss_of_a_peer() -> None:
    # A real refusal: gloo adds no such numbers.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError) as caught:
            Groups(Layout(dp=2), HashStore()).sum_(torch.ones(2, dtype=torch.float8_e4m3fn))
    finally:
        dist.destroy_process_group()
    assert "E-PEER" not in str(caught.value)
