"""What a launcher may start: workers that break by themselves, and one that only lives.

In `broken_work`, the device of slot 1 reports an error while it waits for the others in the first
step, the program at slot 2 crashes there, and nothing is wrong at slot 0.
"""

import os
import signal
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from nmoe_train import loop
from nmoe_train.config import Config
from nmoe_train.elastic.heartbeat import Heart
from nmoe_train.elastic.link import Line
from nmoe_train.elastic.membership import Place, Worker
from nmoe_train.elastic_run import work

ERROR = "CUDA error: the launch timed out and was terminated"


def broken_work(config: Config, store: str, place: Place) -> None:
    """A worker's process."""
    breaks = {1: _device_error, 2: _crash}.get(place[1])
    if breaks is not None:
        real = loop.train_step

        def step(*arguments: Any) -> Any:
            dist.all_reduce = breaks
            return real(*arguments)

        loop.train_step = step
    work(config, store, place)


def _device_error(*_arguments: Any, **_named: Any) -> None:
    raise torch.AcceleratorError(ERROR)


def _crash(*_arguments: Any, **_named: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def crashing_work(config: Config, store: str, place: Place) -> None:
    """Says so, and crashes."""
    os.write(1, b"crashes\n")
    os.kill(os.getpid(), signal.SIGABRT)


def crashing_beside_work(config: Config, store: str, place: Place) -> None:
    """Crashes once another worker has joined."""
    line = Line(store)
    while not line.control().roster:
        time.sleep(0.05)
    crashing_work(config, store, place)


def living_work(config: Config, store: str, place: Place) -> None:
    """Joins, and lives until the run has ended."""
    line = Line(store)
    heart = Heart(store, line.next_number(), 0.1, config.elastic.deadline_s)
    worker = Worker(heart.number, place, "host", "127.0.0.1:1", os.getpid())
    line.tell("join", worker=asdict(worker))
    heart.start()
    while heart.control.end is None:
        time.sleep(0.05)
    line.tell("left", number=heart.number, what="the run has ended")
