"""The band goes to the judge itself, in the order of the corpus, while the budget lasts.

Documents are asked about in windows. Before a window, what the documents before it took is known to
the token, and a document is let in only if its worst case fits in what is left; so which documents
are asked follows from the corpus and the replies alone. Replies are kept, so a run that was killed
finds them again. When not even one more document fits, the judge is done for the whole run. What it
did not score falls to the rule for the band: it is never a low score.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard

from nmoe_data.errors import DataError
from nmoe_data.hydra.calibrate import Calibration
from nmoe_data.hydra.client.budget import Usage
from nmoe_data.hydra.client.control import INTERRUPTED
from nmoe_data.hydra.documents import Document, stratum_of
from nmoe_data.hydra.filter.asking import Asking
from nmoe_data.hydra.filter.chunkfile import SCORES_SCHEMA, ChunkResult
from nmoe_data.hydra.filter.decide import BAND, DROP, KEEP, LLM, OPEN
from nmoe_data.hydra.filter.row import Row, read_rows
from nmoe_data.hydra.filter.state import State
from nmoe_data.hydra.filter.work import DIGITS, ZSTANDARD_LEVEL, Job
from nmoe_data.hydra.grading import Grader
from nmoe_data.hydra.heads import Heads
from nmoe_data.hydra.labels import CACHE_NAME, Label
from nmoe_data.hydra.prompt import PromptSettings
from nmoe_data.hydra.session import Session, open_session

WINDOW = 256
# A document's requests: replies without a judgement are asked for again, with more room if cut.
WORST_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a document of the band. row: with the judge's scores if it gave any."""

    row: Row
    decision: str


class BandJudge:
    """Closes the band of parts; its counts and costs are in `state.llm`.

    rule: KEEP or DROP, for what the judge did not score. tick: called ten times a second while
    requests are under way; a KeyboardInterrupt raised in it stops them gently.
    """

    def __init__(
        self, out: Path, job: Job, asking: Asking, rule: str, heads: Heads, state: State
    ) -> None:
        assert heads.calibration is not None
        self._job = job
        self._asking = asking
        self._rule = rule
        self._names = heads.rubric.names
        self._calibration: Calibration = heads.calibration
        self._state = state
        if not state.llm:
            state.llm = _nothing_asked()
        self.tick: Callable[[], None] = lambda: None
        self._trouble: BaseException | None = None
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        try:
            self._session: Session = self._runner.run(self._open(out, heads))
        except BaseException:
            self.close()
            raise
        self._grader: Grader = self._session.graders(PromptSettings())[0]

    async def _open(self, out: Path, heads: Heads) -> Session:
        asking = self._asking
        return await self._stack.enter_async_context(
            open_session(
                [asking.judge],
                heads.rubric,
                out / CACHE_NAME,
                max_cost=asking.max_cost,
                max_tokens=asking.max_tokens,
                progress=lambda _: self._tick(),
            )
        )

    def close(self) -> None:
        """Ends connections and the cache."""
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def __call__(self, read: Callable[[], Iterator[ChunkResult]]) -> Iterator[ChunkResult]:
        """Yields a part's chunks with every document decided; `read` gives them anew each time."""
        open_rows = (row for chunk in read() for row in _rows(chunk) if row.decided_by == BAND)
        verdicts = iter(self._verdicts(open_rows))
        for chunk in read():
            yield self._closed(chunk, verdicts)

    def _verdicts(self, rows: Iterator[Row]) -> list[Verdict]:
        """Returns a verdict for each row, without its text, so that they fit in memory."""
        found: list[Verdict] = []
        while window := list(islice(rows, WINDOW)):
            while window:
                asked = self._admitted(window)
                labels = self._grade(asked) if asked else {}
                taken = asked or window
                found += [self._verdict(row, labels.get(row.id)) for row in taken]
                window = window[len(taken) :]
        return found

    def _admitted(self, window: Sequence[Row]) -> list[Row]:
        """Returns the first documents of a window whose worst cases fit in the budget."""
        llm, asking = self._state.llm, self._asking
        if llm["stopped"]:
            return []
        left = len(window)
        if asking.max_requests is not None:
            left = min(left, asking.max_requests - llm["requests"])
        cost, tokens = llm["cost"], llm["prompt_tokens"] + llm["completion_tokens"]
        admitted = []
        for row in window[:left]:
            worst = self._worst(row)
            cost += worst.cost
            tokens += worst.tokens
            if cost > (asking.max_cost or cost) or tokens > (asking.max_tokens or tokens):
                break
            admitted.append(row)
        llm["stopped"] = not admitted
        return admitted

    def _worst(self, row: Row) -> Usage:
        *_, once = self._grader.first_request(self._document(row))
        return Usage(
            WORST_REQUESTS * once.prompt_tokens,
            WORST_REQUESTS * once.completion_tokens,
            WORST_REQUESTS * once.cost,
        )

    def _document(self, row: Row) -> Document:
        return Document(row.id, row.text, row.source, row.offset, stratum_of("", row.text))

    def _grade(self, rows: Sequence[Row]) -> dict[str, Label]:
        """Returns the labels by id; equal texts are asked about once.

        Raises DataError: what ended the session. KeyboardInterrupt after a gentle stop.
        """
        unique = {row.id: self._document(row) for row in rows}
        documents = list(unique.values())
        graded = self._runner.run(self._session.grade(documents, PromptSettings()))
        if self._trouble is not None:
            raise self._trouble
        control = self._session.control
        if control.error is not None:
            raise control.error
        if control.stopped_by == INTERRUPTED:
            raise KeyboardInterrupt
        labels = {label.document_id: label for label in graded}
        for label in labels.values():
            self._book(label)
        self._state.llm["requests"] += len(rows)
        # The session's own limit is the last word, should a document pass its worst case.
        self._state.llm["stopped"] |= control.stopped_by is not None
        return labels

    def _book(self, label: Label) -> None:
        llm = self._state.llm
        llm["prompt_tokens"] += label.prompt_tokens
        llm["completion_tokens"] += label.completion_tokens
        llm["cost"] += label.cost
        name = label.detail or label.status
        llm["classes"][name] = llm["classes"].get(name, 0) + 1

    def _tick(self) -> None:
        try:
            self.tick()
        except (DataError, KeyboardInterrupt, RuntimeError) as error:
            self._trouble = error
            raise KeyboardInterrupt from None

    def _verdict(self, row: Row, label: Label | None) -> Verdict:
        bare = replace(row, text="")
        if label is None or label.scores is None:
            return Verdict(bare, self._rule)
        scores = np.array([label.expected or label.scores], np.float32)
        quality = float(self._calibration.quality(scores)[0])
        short = scores[0].astype(float).round(DIGITS).tolist()
        judged = replace(
            bare,
            quality=round(quality, DIGITS),
            scores=dict(zip(self._names, short, strict=True)),
            decided_by=LLM,
        )
        return Verdict(judged, KEEP if quality >= self._calibration.good else DROP)

    def _closed(self, chunk: ChunkResult, verdicts: Iterator[Verdict]) -> ChunkResult:
        lines, dropped, made = [], list(chunk.dropped), []
        for row in _rows(chunk):
            if row.decided_by != BAND:
                lines.append(row.line())
                continue
            verdict = next(verdicts)
            made.append(verdict)
            whole = replace(verdict.row, text=row.text)
            if verdict.decision == KEEP:
                lines.append(whole.line())
            else:
                dropped.append((whole.sample_key(self._job.seed), whole.sample_line()))
        frame = zstandard.ZstdCompressor(level=ZSTANDARD_LEVEL).compress(b"".join(lines))
        return replace(
            chunk,
            kept=frame,
            dropped=sorted(dropped)[: self._job.sample],
            scores=_with_verdicts(chunk.scores, made),
        )


def _nothing_asked() -> dict[str, Any]:
    tokens = {"prompt_tokens": 0, "completion_tokens": 0}
    return {"requests": 0, **tokens, "cost": 0.0, "classes": {}, "stopped": False}


def _rows(chunk: ChunkResult) -> list[Row]:
    # A worker's frame is a stream, which does not say how long it is.
    return read_rows(zstandard.ZstdDecompressor().decompressobj().decompress(chunk.kept))


def _with_verdicts(table: pa.Table, made: Sequence[Verdict]) -> pa.Table:
    """Returns the rows of a chunk with those that were open filled in, in their order."""
    rows = table.to_pylist()
    verdicts = iter(made)
    for row in rows:
        if row["decision"] == OPEN:
            verdict = next(verdicts)
            row["decision"], row["decided_by"] = verdict.decision, verdict.row.decided_by
            row["quality"], row["scores"] = verdict.row.quality, list(verdict.row.scores.values())
    return pa.Table.from_pylist(rows, SCORES_SCHEMA)
