"""The store that a generation's groups see: no wait in it outlasts the generation."""

import time

import pytest
import torch
import torch.distributed as dist
from nmoe_train.elastic.link import GenerationStore
from nmoe_train.elastic.recover import _forget_groups
from nmoe_train.errors import TrainError
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import join_groups
from torch._C._distributed_c10d import TCPStore


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def store(server: TCPStore, ended: bool, patience_s: float = 60.0) -> GenerationStore:
    return GenerationStore(f"127.0.0.1:{server.port}", lambda: ended, patience_s)


def test_what_is_there_is_read_and_what_is_not_is_waited_for(server: TCPStore) -> None:
    whole = store(server, ended=False, patience_s=0.2)
    whole.set("a", "1")
    assert whole.get("a") == b"1"
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        whole.get("b")
    assert 0.2 <= time.monotonic() - began_s < 30.0


def test_a_wait_ends_with_the_generation(server: TCPStore) -> None:
    over = store(server, ended=True)
    over.set("a", "1")
    over.wait(["a"])
    with pytest.raises(RuntimeError, match="has ended"):
        over.wait(["a", "b"])


def test_after_groups_that_could_not_be_made_the_next_get_the_names_they_have_elsewhere(
    server: TCPStore,
) -> None:
    # torch counts groups to name them; a rank whose count is ahead waits where nobody else looks.
    with pytest.raises(TrainError, match="E-GROUP"):
        join_groups(Layout(dp=2), torch.device("cpu"), 5.0, store(server, ended=True))
    counted = dist.distributed_c10d._world
    assert counted.group_count > 0
    _forget_groups()
    assert counted.group_count == 0
