"""A run of requests: the judges, their cache and budget, and the documents that go to them.

Documents are graded many at once, each judge at its own pace. A run that ends early (budget,
quota, Ctrl-C) lets the requests that are under way come in, so that nothing paid is lost.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nmoe_data.errors import DataError
from nmoe_data.hydra.client.budget import Budget, Usage
from nmoe_data.hydra.client.cache import RequestCache
from nmoe_data.hydra.client.control import FAILED, INTERRUPTED, RunControl, RunOver
from nmoe_data.hydra.client.limit import AdaptiveLimit
from nmoe_data.hydra.client.settings import JudgeSettings
from nmoe_data.hydra.client.transport import Transport
from nmoe_data.hydra.documents import Document
from nmoe_data.hydra.grading import Grader
from nmoe_data.hydra.labels import SCORED, Label
from nmoe_data.hydra.prompt import PromptSettings
from nmoe_data.hydra.rubric import Rubric

TICK_S = 0.1
DEFAULT_PROMPTS = PromptSettings()
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GradingProgress:
    """How far a run is.

    done, total: documents times judges. requests: sent in this run. rate: replies a second since
    the start. under_way: requests at once. waiting_s: what a server has asked to wait. scored: of
    those done. unscored: by failure class. usage: spent, with earlier runs.
    """

    done: int
    total: int
    requests: int
    rate: float
    under_way: int
    waiting_s: float
    scored: int
    unscored: dict[str, int]
    usage: Usage


Progress = Callable[[GradingProgress], None]


@dataclass(slots=True)
class Session:
    """An open run; made by `open_session`."""

    rubric: Rubric
    transports: list[Transport]
    cache: RequestCache
    budget: Budget
    control: RunControl
    limits: list[AdaptiveLimit]
    _started_s: float = field(default_factory=time.monotonic)
    _total: int = 0
    _finished: Counter[str] = field(default_factory=Counter)

    def graders(self, prompts: PromptSettings) -> list[Grader]:
        """Returns a grader per judge; those of one judge share its connections and its pace."""
        return [
            Grader(transport, self.rubric, prompts, self.cache, self.budget, limit, self.control)
            for transport, limit in zip(self.transports, self.limits, strict=True)
        ]

    async def grade(self, documents: Sequence[Document], prompts: PromptSettings) -> list[Label]:
        """Returns a label per document and judge, in this order; after a stop, those there are."""
        self._total += len(documents) * len(self.transports)
        labels: dict[tuple[int, int], Label] = {}
        async with asyncio.TaskGroup() as group:
            for number, grader in enumerate(self.graders(prompts)):
                group.create_task(self._grade_by(grader, number, documents, labels))
        return [labels[key] for key in sorted(labels)]

    async def _grade_by(
        self,
        grader: Grader,
        judge: int,
        documents: Iterable[Document],
        labels: dict[tuple[int, int], Label],
    ) -> None:
        # Twice the requests: while some documents wait to repeat theirs, others go ahead.
        places = asyncio.Semaphore(2 * grader.judge.concurrency)
        async with asyncio.TaskGroup() as group:
            for number, document in enumerate(documents):
                await places.acquire()
                if self.control.stopped_by is not None:
                    return
                task = group.create_task(self._grade_one(grader, document))
                task.add_done_callback(lambda _: places.release())
                task.add_done_callback(_keep(labels, (number, judge)))

    async def _grade_one(self, grader: Grader, document: Document) -> Label | None:
        try:
            label = await grader.grade(document)
        except RunOver:
            return None
        except DataError as error:
            self.control.stop(FAILED, error)
            return None
        self._finished[label.detail or label.status] += 1
        return label

    def progress(self) -> GradingProgress:
        """Returns how far the run is."""
        scored = self._finished[SCORED]
        elapsed_s = max(time.monotonic() - self._started_s, 1e-6)
        unscored = {kind: count for kind, count in self._finished.items() if kind != SCORED}
        return GradingProgress(
            done=self._finished.total(),
            total=self._total,
            requests=self.control.requests,
            rate=self.control.replies / elapsed_s,
            under_way=sum(limit.under_way for limit in self.limits),
            waiting_s=max(limit.closed_s for limit in self.limits),
            scored=scored,
            unscored=dict(sorted(unscored.items())),
            usage=self.budget.spent,
        )


def _keep(
    labels: dict[tuple[int, int], Label], place: tuple[int, int]
) -> Callable[["asyncio.Task[Label | None]"], None]:
    def keep(task: "asyncio.Task[Label | None]") -> None:
        if not task.cancelled() and task.exception() is None and (label := task.result()):
            labels[place] = label

    return keep


@asynccontextmanager
async def open_session(
    judges: Sequence[JudgeSettings],
    rubric: Rubric,
    cache: Path,
    *,
    max_cost: float | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> AsyncIterator[Session]:
    """Opens connections, cache and budget for a run.

    judges: with models that differ, as the cache tells them apart by model. cache: the SQLite file;
    what earlier runs spent in it counts against the budget. max_cost, max_tokens: None for no
    limit. progress: called ten times a second; a KeyboardInterrupt raised in it ends the run
    gently.

    Raises DataError: E-ARGUMENT, E-HYDRA-KEY, E-HYDRA-CACHE.
    """
    check_judges(judges, max_cost, max_tokens)
    control = RunControl()
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RequestCache(cache))
        transports = [Transport(judge) for judge in judges]
        for transport in transports:
            stack.push_async_callback(transport.close)
        session = Session(
            rubric=rubric,
            transports=transports,
            cache=store,
            budget=Budget(max_cost, max_tokens, store.spent()),
            control=control,
            limits=[AdaptiveLimit(judge.concurrency, control.sleep) for judge in judges],
        )
        ticker = asyncio.create_task(_tick(session, progress))
        stack.callback(ticker.cancel)
        yield session


async def _tick(session: Session, progress: Progress | None) -> None:
    while progress is not None:
        try:
            progress(session.progress())
        except KeyboardInterrupt:
            session.control.stop(INTERRUPTED)
            return
        await asyncio.sleep(TICK_S)


def check_judges(
    judges: Sequence[JudgeSettings], max_cost: float | None = None, max_tokens: int | None = None
) -> None:
    """Checks what `open_session` is given before anything is done.

    Raises DataError: E-ARGUMENT, E-HYDRA-KEY.
    """
    models = [judge.model for judge in judges]
    if not judges or len(set(models)) < len(models):
        raise DataError(
            "E-ARGUMENT",
            f"the judges' models are {', '.join(models) or 'none'}",
            "name at least one, and no model twice",
        )
    for name, limit in (("max-cost", max_cost), ("max-tokens", max_tokens)):
        # Also true of a limit that is no number.
        if limit is not None and not limit > 0:
            raise DataError("E-ARGUMENT", f"{name} is {limit}", "give more than 0")
    free = [judge.name for judge in judges if not judge.price_in + judge.price_out > 0]
    if max_cost is not None and free:
        raise DataError(
            "E-ARGUMENT",
            f"a cost limit needs prices, and {', '.join(free)} has none",
            "give --price-in and --price-out, or limit by --max-tokens",
        )
    for judge in judges:
        judge.api_key()


@dataclass(frozen=True, slots=True)
class Graded:
    """What a run gave.

    labels: of those documents that have one. usage: spent, with earlier runs. stopped_by, error:
    why it ended early, or None.
    """

    labels: list[Label]
    usage: Usage
    stopped_by: str | None
    error: DataError | None


def grade_documents(
    documents: Sequence[Document],
    judges: Sequence[JudgeSettings],
    rubric: Rubric,
    cache: Path,
    *,
    prompts: PromptSettings = DEFAULT_PROMPTS,
    max_cost: float | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> Graded:
    """Grades documents by all judges and returns when the last reply has come.

    The arguments are those of `open_session`; a budget or an interrupt that ends the run early is
    no error here.

    Raises DataError: those of `open_session`, and what ended the run (E-HYDRA-QUOTA,
    E-HYDRA-UNAUTHORIZED, E-HYDRA-RATE, E-HYDRA-NO-REPLY, E-HYDRA-CACHE, E-DISK-FULL) is in `error`.
    """

    async def work() -> Graded:
        async with open_session(
            judges, rubric, cache, max_cost=max_cost, max_tokens=max_tokens, progress=progress
        ) as session:
            labels = await session.grade(documents, prompts)
        control = session.control
        return Graded(labels, session.budget.spent, control.stopped_by, control.error)

    return asyncio.run(work())
