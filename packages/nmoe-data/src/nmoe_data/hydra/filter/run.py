"""A filter run from its arguments to its output folder; started again, it goes on.

The coordinator hands chunks out to workers, takes them back in any order, and joins them in order.
Nothing it writes depends on the workers: how many they are, where they are, how often it was
stopped. What does depend on them, time and rate, is in timing.json.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, only_writer, os_errors
from nmoe_data.hydra.documents import domains_of
from nmoe_data.hydra.filter.chunkfile import read_chunk
from nmoe_data.hydra.filter.decide import OPEN
from nmoe_data.hydra.filter.executors import Executor, ProcessExecutor
from nmoe_data.hydra.filter.parts import Parts
from nmoe_data.hydra.filter.plan import Chunk, plan_units
from nmoe_data.hydra.filter.result import (
    DROPPED_NAME,
    KEPT_NAME,
    SCORES_NAME,
    SUMMARY_NAME,
    TIMING_NAME,
    WORK_NAME,
    FilterProgress,
    FilterResult,
    Progress,
)
from nmoe_data.hydra.filter.schedule import Schedule
from nmoe_data.hydra.filter.settings import FilterSettings, heads_summary, shared_settings
from nmoe_data.hydra.filter.state import State, check_same_settings, read_state, write_state
from nmoe_data.hydra.filter.work import Done, Job, Task
from nmoe_data.hydra.heads import Heads, open_heads
from nmoe_data.prep.rejects import REJECTED_NAME
from nmoe_data.sources import Source, SourceFile, list_files

if TYPE_CHECKING:
    from nmoe_data.hydra.filter.band import BandJudge

WAIT_SECONDS = 0.2
FIRST_NAMES = {SUMMARY_NAME + ".tmp", REJECTED_NAME}


def filter_corpus(
    source: Source,
    heads: Path,
    out: Path,
    settings: FilterSettings,
    *,
    exclude: Sequence[Path] = (),
    progress: Progress | None = None,
) -> FilterResult:
    """Filters sources by calibrated heads into OUT/kept, OUT/scores and OUT/dropped.jsonl.

    source: a folder, a file, "python-stdlib", or a list of these; files in `out`, `heads` and
    `exclude` are no part of it. out: made if missing; an unfinished run in it goes on, a finished
    one is returned as it is. progress: called now and then; a KeyboardInterrupt raised in it stops
    the run cleanly.

    Raises DataError: E-HYDRA-UNCALIBRATED, E-HYDRA-RESUME, E-HYDRA-WORKER, E-OUT-NOT-EMPTY,
    E-OUT-BUSY, E-NO-TEXT, and those of `open_heads`, `open_encoder`, `list_files`, `os_errors` and
    the judge's client. One bad record never raises: it goes to rejected.jsonl.
    """
    opened = open_heads(heads)
    if opened.calibration is None:
        raise DataError(
            "E-HYDRA-UNCALIBRATED",
            f"the heads in {heads} have no thresholds",
            "run `nmoe-data hydra calibrate` on them first",
        )
    files = list_files(source, [out, heads, *exclude])
    shared = shared_settings(settings, source, files, opened)
    with os_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
        with only_writer(out):
            state = read_state(out)
            if state is None:
                _check_unused(out)
                state = State(shared, heads_summary(opened, heads))
            else:
                check_same_settings(out, state.settings, shared)
                files = _as_first_typed(files, shared["sources"], state.settings["sources"])
            if state.place is None:
                return _finished(out)
            job = _job(files, heads, opened, out, settings, state)
            return _run(out, job, state, settings, opened, progress)


def _as_first_typed(files: list[SourceFile], now: list[str], before: list[str]) -> list[SourceFile]:
    """Returns the files under the names of the run that is resumed, so that its bytes stay."""
    names = dict(zip(now, before, strict=True))
    return [replace(file, root=names[file.root]) for file in files]


def _check_unused(out: Path) -> None:
    names = sorted(path.name for path in out.iterdir() if path.name not in FIRST_NAMES)
    if names:
        raise DataError(
            "E-OUT-NOT-EMPTY",
            f"{out} holds files of something else ({', '.join(names[:3])})",
            "choose a new or empty folder",
        )


def _finished(out: Path) -> FilterResult:
    return FilterResult(out, orjson.loads((out / SUMMARY_NAME).read_bytes()), reused=True)


def _job(
    files: list[SourceFile],
    heads: Path,
    opened: Heads,
    out: Path,
    settings: FilterSettings,
    state: State,
) -> Job:
    domains = domains_of(state.settings["sources"])
    return Job(
        files=[replace(file, path=file.path.absolute()) for file in files],
        domains=[domains[file.root] for file in files],
        heads=heads.absolute(),
        heads_hash=opened.hash,
        work=(out / WORK_NAME).absolute(),
        settings=state.fingerprint,
        text_field=settings.text_field,
        band=settings.band if settings.asking is None else OPEN,
        sample=settings.dropped_sample,
        seed=settings.seed,
        dtype=settings.dtype,
    )


def _run(
    out: Path,
    job: Job,
    state: State,
    settings: FilterSettings,
    heads: Heads,
    progress: Progress | None,
) -> FilterResult:
    write_state(out, state)
    job.work.mkdir(exist_ok=True)
    for path in job.work.glob("*.tmp"):
        path.unlink(missing_ok=True)
    begun, documents = time.monotonic(), state.counts.documents
    with _executor(job, settings) as executor, _band(out, job, settings, heads, state) as band:
        coordinator = Coordinator(out, job, state, executor, band, progress)
        coordinator.run()
    summary = _finish(out, job, state)
    seconds = time.monotonic() - begun
    timing = {
        "seconds": seconds,
        "documents": state.counts.documents - documents,
        "documents_per_s": (state.counts.documents - documents) / seconds,
        "workers": executor.workers,
        "devices": settings.places if settings.ray is None else [f"ray {settings.ray}"],
    }
    atomic_write(out / TIMING_NAME, orjson.dumps(timing, option=orjson.OPT_INDENT_2))
    return FilterResult(out, summary, reused=False)


@contextmanager
def _executor(job: Job, settings: FilterSettings) -> Iterator[Executor]:
    if settings.ray is not None:
        from nmoe_data.hydra.filter.ray_executor import RayExecutor

        executor: Executor = RayExecutor(job, settings.ray, settings.workers)
    else:
        executor = ProcessExecutor(job, settings.places)
    try:
        yield executor
    finally:
        executor.close()


@contextmanager
def _band(
    out: Path, job: Job, settings: FilterSettings, heads: Heads, state: State
) -> Iterator["BandJudge | None"]:
    if settings.asking is None:
        yield None
        return
    from nmoe_data.hydra.filter.band import BandJudge

    judge = BandJudge(out, job, settings.asking, settings.band, heads, state)
    try:
        yield judge
    finally:
        judge.close()


def _finish(out: Path, job: Job, state: State) -> dict[str, Any]:
    if not state.counts.documents:
        reasons = dict(state.counts.rejected)
        _forget(out)
        raise DataError(
            "E-NO-TEXT",
            f"the source holds no usable text (rejected: {reasons})",
            f"see {out / REJECTED_NAME} for each record and its reason",
        )
    shutil.rmtree(job.work)
    state.place = None
    return write_state(out, state)


def _forget(out: Path) -> None:
    """Leaves only the reject file, so that the same folder can be used for a better source."""
    for name in (WORK_NAME, KEPT_NAME, SCORES_NAME):
        shutil.rmtree(out / name)
    (out / DROPPED_NAME).unlink()
    (out / SUMMARY_NAME).unlink()


class Coordinator:
    """Keeps the workers busy and the parts in order, from the place in `state` to the end."""

    def __init__(
        self,
        out: Path,
        job: Job,
        state: State,
        executor: Executor,
        band: "BandJudge | None",
        progress: Progress | None,
    ) -> None:
        assert state.place is not None
        self._job = job
        self._state = state
        self._executor = executor
        self._progress = progress
        self._units = plan_units(job.files)
        place = state.place
        self._schedule = Schedule(
            self._units, place.unit, place.index, place.known, executor.workers
        )
        self._parts = Parts(out, job, state, band)
        self._on_disk = {path.name for path in job.work.iterdir()}
        if band is not None:
            band.tick = self._tick
        self._bytes_done = place.bytes_done
        self._sizes = [0]
        for unit in self._units:
            self._sizes.append(self._sizes[-1] + unit.size)
        self._documents, self._kept = state.counts.documents, state.counts.kept
        self._begun_s, self._before = time.monotonic(), state.counts.documents
        self._rejected = sum(state.counts.rejected.values())

    def run(self) -> None:
        """Does all that is left."""
        try:
            while not self._schedule.finished:
                self._keep_busy(WAIT_SECONDS)
                self._advance()
                self._report()
            self._parts.close_part(self._schedule.place, self._bytes_done)
        finally:
            self._parts.close()

    def _tick(self) -> None:
        """Keeps the workers busy while a part is being closed."""
        self._keep_busy(0.0)
        self._report()

    def _keep_busy(self, seconds: float) -> None:
        """Hands chunks out and takes those back that are done, after at most so many seconds."""
        reused = self._hand_out()
        for done in self._executor.wait(0.0 if reused else seconds):
            self._schedule.came_back(done)

    def _hand_out(self) -> bool:
        """Gives the workers what they can take; returns whether chunks were found done instead."""
        reused = False
        while self._executor.can_take():
            chunk = self._schedule.hand_out()
            if chunk is None:
                break
            done = self._found(chunk) if chunk.name in self._on_disk else None
            if done is not None:
                self._schedule.came_back(done)
                reused = True
                continue
            known = self._schedule.known_start(chunk)
            self._executor.submit(Task(chunk, known, self._parts.below))
        return reused

    def _found(self, chunk: Chunk) -> Done | None:
        """Returns a chunk that an earlier start has done, None if its file is no good."""
        result = read_chunk(self._job.work / chunk.name, self._job.settings)
        return None if result is None else Done.of(chunk, result)

    def _advance(self) -> None:
        while (done := self._schedule.advance()) is not None:
            self._documents += done.documents
            self._kept += done.kept
            self._rejected += done.rejected
            self._bytes_done = self._done_up_to(done)
            if self._parts.add(done.chunk, done.documents):
                self._parts.close_part(self._schedule.place, self._bytes_done)
                self._kept = self._state.counts.kept
        self._parts.forget([done.chunk for done in self._schedule.past_the_end()])

    def _done_up_to(self, done: Done) -> int:
        unit = self._units[done.chunk.unit]
        if unit.chunks is None:
            return self._sizes[unit.number] + done.consumed
        return self._sizes[unit.number] + unit.size * (done.chunk.index + 1) // unit.chunks

    def _report(self) -> None:
        if self._progress is None:
            return
        self._progress(
            FilterProgress(
                bytes_done=self._bytes_done,
                bytes_total=self._sizes[-1],
                documents=self._documents,
                kept=self._kept,
                rejected=self._rejected,
                asked=self._state.llm.get("requests", 0),
                documents_per_s=(self._documents - self._before)
                / max(time.monotonic() - self._begun_s, 1e-6),
            )
        )
