"""Messages between stages: the right one arrives, and any other is an error that names both."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nmoe_train.errors import TrainError
from nmoe_train.parallel import Layout
from nmoe_train.parallel.groups import Groups
from nmoe_train.parallel.messages import HEADER_NUMBERS, Direction, Header, Links, open_links

CPU = torch.device("cpu")
RIGHT = Header(2, 7, 1, 3, Direction.STATES, (2, 3), torch.float32)
OTHERS = {
    "attempt": 1,
    "step": 6,
    "micro": 0,
    "part": 1,
    "direction": Direction.EVALUATION,
    "shape": (3, 2),
    "dtype": torch.bfloat16,
}


def stages(
    fork: Callable[[Callable[[], object]], Any],
    folder: Path,
    number: int,
    work: Callable[[int, Groups], object],
    *,
    finish: bool = True,
) -> list[tuple[int, str, str]]:
    """Runs work(stage, groups) in a process for each stage; their codes, output and errors."""

    def run(stage: int) -> None:
        store = dist.FileStore(str(folder / "store"), number)
        dist.init_process_group("gloo", store=store, rank=stage, world_size=number)
        # Nobody leaves, nor gives up what is still to be sent, before the others are done.
        kept = work(stage, Groups(Layout(pp=number, rank=stage), store))
        if finish:
            dist.barrier()
        del kept

    children = [fork(lambda stage=stage: run(stage)) for stage in range(number)]
    return [child.wait() for child in children]


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")


def outcome(work: Callable[[], object]) -> str:
    try:
        return repr(work())
    except TrainError as error:
        return str(error)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_neighbours_hear_each_other_both_ways_in_a_row_and_in_a_ring(
    fork: Callable[..., Any], tmp_path: Path, number: int, ring: bool
) -> None:
    def work(stage: int, groups: Groups) -> None:
        links = open_links(groups, CPU, 30.0, ring=ring, ends=False)
        last = number - 1
        assert (links.states_in is None) == (not ring and stage == 0)
        assert (links.gradients_in is None) == (not ring and stage == last)
        for inbox, outbox in (
            (links.states_in, links.states_out),
            (links.gradients_in, links.gradients_out),
        ):
            headers = [dataclasses.replace(RIGHT, micro=micro) for micro in range(5)]
            if inbox is not None:
                inbox.expect(headers)
            for header in headers if outbox is not None else []:
                assert outbox is not None
                outbox.send(header, torch.full((2, 3), float(10 * stage + header.micro)))
            came = [inbox.receive(header)[0, 0].item() for header in headers if inbox is not None]
            say([int(value) for value in came])
        links.finish()

    for stage, (code, out, err) in enumerate(stages(fork, tmp_path, number, work)):
        assert code == 0, err
        before, after = (stage - 1) % number, (stage + 1) % number
        wanted = [
            [10 * peer + micro for micro in range(5)] if ring or abs(peer - stage) == 1 else []
            for peer in (before, after)
        ]
        if not ring and number == 2:
            wanted = [[], wanted[1]] if stage == 0 else [wanted[0], []]
        assert out.splitlines() == [str(part) for part in wanted]


def test_a_message_that_is_not_the_expected_one_is_an_error_that_names_both(
    fork: Callable[..., Any], tmp_path: Path
) -> None:
    strays = [dataclasses.replace(RIGHT, **{name: value}) for name, value in OTHERS.items()]

    def work(stage: int, groups: Groups) -> list[Links]:
        opened = []
        for stray in strays:
            links = open_links(groups, CPU, 30.0, ring=False, ends=False)
            if links.states_out is not None:
                links.states_out.send(stray, torch.ones(stray.shape, dtype=stray.dtype))
            if links.states_in is not None:
                inbox = links.states_in
                inbox.expect([RIGHT])
                say(outcome(lambda inbox=inbox: inbox.receive(RIGHT)))
            opened.append(links)
        return opened

    _, (code, out, err) = stages(fork, tmp_path, 2, work)
    assert code == 0, err
    for stray, line in zip(strays, out.splitlines(), strict=True):
        assert line.startswith(
            f"E-PIPELINE-MESSAGE: rank 1 expected from rank 0 {RIGHT}, and there came {stray}; "
        )
    assert str(RIGHT) == (
        "the states of micro-batch 1 for part 3 in step 7 of attempt 2, float32 [2, 3]"
    )


def test_a_repeated_message_is_an_error(fork: Callable[..., Any], tmp_path: Path) -> None:
    second = dataclasses.replace(RIGHT, micro=2)

    def work(stage: int, groups: Groups) -> Links:
        links = open_links(groups, CPU, 30.0, ring=False, ends=False)
        if links.states_out is not None:
            for _ in range(2):
                links.states_out.send(RIGHT, torch.ones(2, 3))
        if links.states_in is not None:
            links.states_in.expect([RIGHT, second])
            links.states_in.receive(RIGHT)
            say(outcome(lambda: receive(links, second)))
        return links

    _, (code, out, err) = stages(fork, tmp_path, 2, work)
    assert code == 0, err
    assert out.startswith(f"E-PIPELINE-MESSAGE: rank 1 expected from rank 0 {second}, and there")


def receive(links: Links, header: Header) -> torch.Tensor:
    assert links.states_in is not None
    return links.states_in.receive(header)


def test_what_is_no_header_is_said_to_be_none() -> None:
    assert Header.read(RIGHT.numbers()) == RIGHT
    assert RIGHT.numbers().shape == (HEADER_NUMBERS,)
    assert Header.read(torch.full((HEADER_NUMBERS,), -1)) is None
    assert Header.read(torch.full((HEADER_NUMBERS,), 2**40)) is None


def test_a_neighbour_that_dies_is_one_line(fork: Callable[..., Any], tmp_path: Path) -> None:
    def work(stage: int, groups: Groups) -> None:
        links = open_links(groups, CPU, 30.0, ring=False, ends=False)
        if stage == 0:
            os._exit(9)
        assert links.states_in is not None
        inbox = links.states_in

        def wait() -> torch.Tensor:
            inbox.expect([RIGHT])
            return inbox.receive(RIGHT)

        say(outcome(wait))

    (died, *_), (code, out, err) = stages(fork, tmp_path, 2, work, finish=False)
    assert (died, code) == (9, 0), err
    assert out.startswith(
        "E-PEER: rank 1, receiving from rank 0, a stage before or after, found that another rank "
    )
    assert len(out.splitlines()) == 1


@pytest.fixture(autouse=True)
def quiet_store(tmp_path: Path) -> Iterator[None]:
    """Each test has a store of its own."""
    yield
    (tmp_path / "store").unlink(missing_ok=True)
