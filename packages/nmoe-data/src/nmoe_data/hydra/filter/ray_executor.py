"""Chunks as calls of Ray actors, over one machine or many that share sources and output folder.

An actor is what a worker process is elsewhere: it opens heads and encoder once, has one CPU, and so
computes with one thread (Ray sees to that); the bytes are the same.
"""

import logging
import os
from typing import Any

from nmoe_data.errors import DataError
from nmoe_data.hydra.extras import extra
from nmoe_data.hydra.filter.executors import Failure
from nmoe_data.hydra.filter.work import Done, Job, Task, Worker

QUEUED = 2
LOCAL = "local"


class Actor:
    """A worker inside a Ray process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._worker: Worker | None = None

    def run(self, task: Task) -> Done | Failure:
        """Does one chunk; an exception comes back as a value, as Ray would wrap it."""
        try:
            self._worker = self._worker or Worker(self._job, "cpu")
            return self._worker.run(task)
        except Exception as error:  # whatever it is, the run that waits for it must hear
            return Failure(error)


class RayExecutor:
    """`workers` actors on the cluster at `address`; "local" makes one in this machine.

    A cluster that this process already uses is used, and left running.
    Raises DataError: E-HYDRA-EXTRA if Ray is not installed, E-HYDRA-RAY if there is no cluster.
    """

    def __init__(self, job: Job, address: str, workers: int) -> None:
        # Under `uv run` Ray would start each actor by `uv run` too, in a copy of the folder; an
        # actor needs the interpreter that is running, as on machines without uv.
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        with extra("ray"):
            import ray
        self._ray = ray
        self.workers = workers
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(ray, address, workers)
        actor: Any = ray.remote(num_cpus=1)(Actor)
        shared = ray.put(job)
        self._actors: list[Any] = [actor.remote(shared) for _ in range(workers)]
        self._queued = [0] * workers
        self._running: dict[Any, int] = {}

    def can_take(self) -> bool:
        return min(self._queued) < QUEUED

    def submit(self, task: Task) -> None:
        number = self._queued.index(min(self._queued))
        self._queued[number] += 1
        self._running[self._actors[number].run.remote(task)] = number

    def wait(self, seconds: float) -> list[Done]:
        running = list(self._running)
        if not running or not self._ray.wait(running, timeout=seconds)[0]:
            return []
        ready, _ = self._ray.wait(running, num_returns=len(running), timeout=0)
        return [self._take(reference) for reference in ready]

    def _take(self, reference: Any) -> Done:
        self._queued[self._running.pop(reference)] -= 1
        try:
            message = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise DataError(
                "E-HYDRA-WORKER",
                f"a Ray worker died ({str(error).splitlines()[0]})",
                "run the same command again to go on, with fewer --workers if memory ran out",
            ) from error
        if isinstance(message, Failure):
            raise message.error()
        return message

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._ours:
            self._ray.shutdown()


def _connect(ray: Any, address: str, workers: int) -> None:
    place: dict[str, Any] = {"address": address}
    if address == LOCAL:
        place = {"address": "local", "num_cpus": workers, "include_dashboard": False}
    try:
        ray.init(**place, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DataError(
            "E-HYDRA-RAY",
            f"no Ray cluster at {address} ({str(error).splitlines()[0]})",
            "start one with `ray start --head`, or give --ray local",
        ) from error
