"""Worker processes, one per CPU share or device, that live as long as the coordinator.

Each is started afresh (no fork: encoders may hold threads and devices) and talks over its own pipe.
When the coordinator is gone, however it went, the pipe ends and so does the worker. Workers leave
Ctrl-C to the coordinator. CPU workers compute with one thread each, so that sums are added in the
same order whatever the number of workers.
"""

import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

from nmoe_data.errors import DataError
from nmoe_data.hydra.filter.work import Done, Job, Task, Worker

# One in work and one waiting, so that no worker waits for the coordinator.
QUEUED = 2
STOP_SECONDS = 5.0
ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)
# Arrays of some MiB come and go with each batch; by default glibc gives their pages back to the
# system each time and faults them in anew, which takes a quarter of the bundled encoder's time.
KEEP_PAGES = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(1 << 28))


class Executor(Protocol):
    """Runs tasks somewhere."""

    workers: int

    def can_take(self) -> bool:
        """Whether another task would be begun soon."""

    def submit(self, task: Task) -> None:
        """Hands over a task; only after `can_take`."""

    def wait(self, seconds: float) -> list[Done]:
        """Returns tasks done since the last call, after at most so many seconds.

        Raises DataError: what the worker raised, or E-HYDRA-WORKER if it died.
        """

    def close(self) -> None:
        """Gives everything back; what is in work may be lost."""


class ProcessExecutor:
    """One process per entry of `devices` ("cpu" as often as wanted, or "cuda:0", "cuda:1")."""

    def __init__(self, job: Job, devices: Sequence[str]) -> None:
        self.workers = len(devices)
        self._processes: dict[Connection, SpawnProcess] = {}
        self._queued: dict[Connection, int] = {}
        try:
            for device in devices:
                self._start(job, device)
        except BaseException:
            self.close()
            raise

    def _start(self, job: Job, device: str) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, job, device), daemon=True)
        with worker_environment(device):
            process.start()
        theirs.close()
        self._processes[ours] = process
        self._queued[ours] = 0

    def can_take(self) -> bool:
        return min(self._queued.values()) < QUEUED

    def submit(self, task: Task) -> None:
        connection = min(self._queued, key=self._queued.__getitem__)
        self._queued[connection] += 1
        try:
            connection.send(task)
        except OSError:
            # It is gone; what it said last, or how it died, comes with `wait`.
            return

    def wait(self, seconds: float) -> list[Done]:
        done = []
        for connection in wait(list(self._processes), seconds):
            assert isinstance(connection, Connection)
            done.append(self._receive(connection))
        return done

    def _receive(self, connection: Connection) -> Done:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            raise _death(self._processes[connection]) from None
        if isinstance(message, Failure):
            raise message.error()
        self._queued[connection] -= 1
        return message

    def close(self) -> None:
        for connection in self._processes:
            connection.close()
        for process in self._processes.values():
            process.join(STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


class Failure:
    """An exception of a worker, in a form that passes a pipe."""

    def __init__(self, error: BaseException) -> None:
        self._code = error.code if isinstance(error, DataError) else None
        self._text = (
            str(error)
            if isinstance(error, DataError)
            else "".join(traceback.format_exception(error))
        )

    def error(self) -> Exception:
        """Returns the DataError again, or a RuntimeError with the worker's traceback."""
        if self._code is None:
            return RuntimeError(self._text)
        what, _, remedy = self._text.removeprefix(f"{self._code}: ").rpartition("; ")
        return DataError(self._code, what, remedy)


def serve(connection: Connection, job: Job, device: str) -> None:
    """Does the tasks that come over `connection` until it ends; runs in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = Worker(job, device)
        while True:
            try:
                task = connection.recv()
            except (EOFError, OSError):
                return
            connection.send(worker.run(task))
    except BrokenPipeError:
        return
    except Exception as error:  # whatever it is, the run that waits for it must hear
        with suppress(OSError):  # nobody is left to hear it
            connection.send(Failure(error))


def _death(process: SpawnProcess) -> DataError:
    process.join(STOP_SECONDS)
    code = process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    return DataError(
        "E-HYDRA-WORKER",
        f"a worker process {how}",
        "run the same command again to go on, with fewer --workers if memory ran out",
    )


@contextmanager
def worker_environment(device: str) -> Iterator[None]:
    """Gives processes that are started in the block what suits a worker on `device`.

    On a CPU: one thread, and an allocator that keeps its pages.
    """
    wanted = {**KEEP_PAGES, **ONE_THREAD} if device == "cpu" else {}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
