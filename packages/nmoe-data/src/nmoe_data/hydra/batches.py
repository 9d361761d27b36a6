"""Requests by a server's batch interface: half the price at some, within a day.

The first request of every document that the cache lacks goes into JSON lines files; the replies go
into the cache under their keys, and the live run that follows finds them there. What a batch did
not answer (expired, refused, cut) is left to the live run. A file is named by the hash of its
content and recorded before it is sent; a batch carries that hash, so a run that was killed between
creating one and noting its number finds it again and does not pay twice.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, os_errors
from nmoe_data.hydra.client import StoredReply, Transport, Usage
from nmoe_data.hydra.client.control import FAILED, INTERRUPTED, RunOver, stopping_error
from nmoe_data.hydra.client.failures import (
    POLICIES,
    RequestFailure,
    failure_of_status,
    one_line,
)
from nmoe_data.hydra.documents import Document
from nmoe_data.hydra.grading import Grader
from nmoe_data.hydra.labels import SCHEMA_VERSION, read_json
from nmoe_data.hydra.prompt import PromptSettings
from nmoe_data.hydra.reply import HTML_PAGE
from nmoe_data.hydra.session import Session

FOLDER = "batches"
STATE_NAME = "batches.json"
MAX_REQUESTS = 50_000
MAX_BYTES = 190 << 20
POLL_S = 20.0
WINDOW: Literal["24h"] = "24h"
ENDPOINT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
HASH_METADATA = "nmoe_data_input"
ENDED = frozenset({"completed", "expired", "cancelled", "failed"})
LISTED = 100
DAMAGED_LINE = "damaged_line"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far the batches are: requests done, of all; the state of the one that is waited for."""

    done: int
    total: int
    state: str


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it is recorded.

    name: of its file, by hash. model: its judge's. requests: in it. worst: their use at most. id:
    the server's, None before it is known. collected: its replies are in the cache.
    """

    name: str
    model: str
    requests: int
    worst: Usage
    id: str | None = None
    collected: bool = False


class BatchRun:
    """The batches of one session and one LABELS folder."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        progress: Callable[[BatchProgress], None] | None,
        poll_s: float,
    ) -> None:
        self._session = session
        self._folder = folder / FOLDER
        self._state_path = folder / STATE_NAME
        self._progress = progress
        self._poll_s = poll_s
        self._batches = self._read_state()

    async def run(self, documents: list[Document], prompts: PromptSettings) -> None:
        """Sends what is not sent yet, waits for all batches, and stores their replies.

        Raises RunOver, DataError: E-HYDRA-BATCH, those of the cache and of `os_errors`.
        """
        with os_errors("write", self._folder):
            self._folder.mkdir(exist_ok=True)
            for grader in self._session.graders(prompts):
                self._prepare(grader, documents)
        for number, batch in enumerate(self._batches):
            if not batch.collected:
                await self._create(number)
        for number, batch in enumerate(self._batches):
            if not batch.collected:
                await self._collect(number)

    def _read_state(self) -> list[Batch]:
        if not self._state_path.is_file():
            return []
        entries = read_json(self._state_path)["batches"]
        return [Batch(**{**entry, "worst": Usage(**entry["worst"])}) for entry in entries]

    def _update(self, number: int, batch: Batch) -> None:
        self._batches[number] = batch
        content = {
            "schema_version": SCHEMA_VERSION,
            "batches": [asdict(batch) for batch in self._batches],
        }
        with os_errors("write", self._state_path):
            atomic_write(self._state_path, orjson.dumps(content, option=orjson.OPT_INDENT_2))

    def _prepare(self, grader: Grader, documents: list[Document]) -> None:
        """Writes the files of the requests that the cache lacks and no batch has had."""
        budget = self._session.budget
        for batch in self._batches:
            if batch.model == grader.judge.model and not batch.collected:
                # It is under way whatever the budget says now.
                budget.hold(batch.worst)
        sent = set(self._sent(grader.judge.model))
        lines: list[bytes] = []
        size, worst = 0, Usage()
        for document in documents:
            key, body, most = grader.first_request(document)
            if key in sent or self._session.cache.get(key) is not None:
                continue
            if not budget.fits(worst + most):
                break
            line = _line(key, body)
            if lines and (len(lines) >= MAX_REQUESTS or size + len(line) > MAX_BYTES):
                self._record(grader, lines, worst)
                lines, size, worst = [], 0, Usage()
            sent.add(key)
            lines.append(line)
            size += len(line)
            worst += most
        if lines:
            self._record(grader, lines, worst)

    def _sent(self, model: str) -> Iterator[str]:
        for batch in self._batches:
            if batch.model == model:
                with (self._folder / batch.name).open("rb") as file:
                    yield from (orjson.loads(line)["custom_id"] for line in file)

    def _record(self, grader: Grader, lines: list[bytes], worst: Usage) -> None:
        content = b"".join(lines)
        name = f"{hashlib.sha256(content).hexdigest()}.jsonl"
        atomic_write(self._folder / name, content)
        self._session.budget.hold(worst)
        self._batches.append(Batch(name, grader.judge.model, len(lines), worst))
        self._update(len(self._batches) - 1, self._batches[-1])

    def _transport(self, batch: Batch) -> Transport:
        for transport in self._session.transports:
            if transport.judge.model == batch.model:
                return transport
        raise DataError(
            "E-HYDRA-BATCH",
            f"a batch of the judge {batch.model} is under way",
            "name this judge too, or remove its entry from batches.json",
        )

    async def _create(self, number: int) -> None:
        batch = self._batches[number]
        if batch.id is not None:
            return
        transport = self._transport(batch)
        id = await self._find(transport, batch) or await self._send(transport, batch)
        self._update(number, replace(batch, id=id))

    async def _find(self, transport: Transport, batch: Batch) -> str | None:
        """Returns the number of a batch that an earlier run created and could not note."""
        listed = await self._repeated(
            transport,
            lambda: transport.call(lambda client: client.batches.list(limit=LISTED)),
            "data",
        )
        for found in listed.data:
            if (found.metadata or {}).get(HASH_METADATA) == _hash_of(batch):
                return found.id
        return None

    async def _send(self, transport: Transport, batch: Batch) -> str:
        content = (self._folder / batch.name).read_bytes()
        file = await self._repeated(
            transport,
            lambda: transport.call(
                lambda client: client.files.create(file=(batch.name, content), purpose="batch")
            ),
            "id",
        )
        created = await self._repeated(
            transport,
            lambda: transport.call(
                lambda client: client.batches.create(
                    completion_window=WINDOW,
                    endpoint=ENDPOINT,
                    input_file_id=file.id,
                    metadata={HASH_METADATA: _hash_of(batch)},
                )
            ),
            "id",
        )
        return created.id

    async def _collect(self, number: int) -> None:
        batch = self._batches[number]
        transport = self._transport(batch)
        ended = await self._wait(transport, batch)
        if ended.status == "failed":
            raise _failed(transport, ended)
        used = Usage()
        for file_id in (ended.output_file_id, ended.error_file_id):
            if file_id is not None:
                content = await self._download(transport, file_id)
                used += await self._store(transport, batch, content)
        await self._session.budget.settle(batch.worst, used)
        self._update(number, replace(batch, collected=True))

    async def _wait(self, transport: Transport, batch: Batch) -> Any:
        assert batch.id is not None
        id = batch.id
        while True:
            now = await self._repeated(
                transport,
                lambda: transport.call(lambda client: client.batches.retrieve(id)),
                "status",
            )
            counts = now.request_counts
            self._show(batch, now.status, counts.completed + counts.failed if counts else 0)
            if now.status in ENDED:
                return now
            await self._session.control.sleep(self._poll_s)

    def _show(self, waiting: Batch, state: str, done: int) -> None:
        if self._progress is None:
            return
        collected = sum(batch.requests for batch in self._batches if batch.collected)
        total = sum(batch.requests for batch in self._batches)
        try:
            self._progress(BatchProgress(collected + done, total, state))
        except KeyboardInterrupt:
            self._session.control.stop(INTERRUPTED)
            raise RunOver from None

    async def _download(self, transport: Transport, file_id: str) -> bytes:
        response = await self._repeated(
            transport,
            lambda: transport.call(lambda client: client.files.content(file_id)),
            "content",
        )
        return response.content

    async def _store(self, transport: Transport, batch: Batch, content: bytes) -> Usage:
        """Puts the replies in a result file into the cache; returns what they took."""
        replies: dict[str, StoredReply] = {}
        known = dict.fromkeys(self._sent(batch.model))
        for line in content.splitlines():
            try:
                result = orjson.loads(line)
                key = result["custom_id"]
                if key in known:
                    replies[key] = _reply(transport, result)
            except RequestFailure as failure:
                self._session.control.events[failure.kind] += 1
            except (orjson.JSONDecodeError, LookupError, TypeError):
                self._session.control.events[DAMAGED_LINE] += 1
        await self._session.cache.put_all(
            (key, batch.model, reply) for key, reply in replies.items()
        )
        self._session.control.replies += len(replies)
        return sum((reply.usage for reply in replies.values()), Usage())

    async def _repeated(
        self, transport: Transport, work: Callable[[], Awaitable[Result]], wanted: str
    ) -> Result:
        """Returns what `work` returns, after repeats where the failure allows them.

        wanted: the field that an answer of the interface has; the client checks none.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = await work()
                if getattr(answer, wanted, None) is not None:
                    return answer
                failure = RequestFailure(HTML_PAGE, "it answers something else")
            except RequestFailure as met:
                failure = met
            control, policy = self._session.control, POLICIES[failure.kind]
            control.events[failure.kind] += 1
            if policy.stops:
                control.stop(FAILED, stopping_error(transport.judge, failure))
                raise RunOver
            if not policy.first_s or attempt >= policy.attempts:
                raise DataError(
                    "E-HYDRA-BATCH",
                    f"the batch interface of {transport.judge.host} failed ({failure})",
                    "run the same command again to go on, or leave out --batch",
                )
            await control.sleep(failure.retry_after_s or policy.delay_s(attempt, 0.0))


def _line(key: str, body: dict[str, Any]) -> bytes:
    request = {"custom_id": key, "method": "POST", "url": ENDPOINT, "body": body}
    return orjson.dumps(request) + b"\n"


def _hash_of(batch: Batch) -> str:
    return batch.name.removesuffix(".jsonl")


def _reply(transport: Transport, result: dict[str, Any]) -> StoredReply:
    """Returns the reply in one line of a result file; raises RequestFailure where it has none."""
    response = result.get("response")
    if not response:
        code = (result.get("error") or {}).get("code") or "batch_error"
        raise RequestFailure(str(code))
    if response["status_code"] != 200:
        raise failure_of_status(response["status_code"], response["body"], {}, transport.secrets)
    return transport.reply_of(response["body"], 0.0, Usage())


def _failed(transport: Transport, batch: Any) -> DataError:
    messages = [error.message or "" for error in (batch.errors and batch.errors.data) or []]
    what = one_line("; ".join(messages) or "no reason given", transport.secrets)
    return DataError(
        "E-HYDRA-BATCH",
        f"{transport.judge.host} refused the batch {batch.id} ({what})",
        "mend what it says and remove batches.json, or leave out --batch",
    )


async def fill_from_batches(
    session: Session,
    documents: list[Document],
    prompts: PromptSettings,
    folder: Path,
    progress: Callable[[BatchProgress], None] | None = None,
    poll_s: float = POLL_S,
) -> None:
    """Has the documents graded in batches, as far as the budget allows, and fills the cache.

    An interrupt or a failure ends the run: `session.control` says so.
    """
    try:
        await BatchRun(session, folder, progress, poll_s).run(documents, prompts)
    except RunOver:
        return
    except DataError as error:
        session.control.stop(FAILED, error)
