"""Every paid reply, by the content of its request, on disk before it counts.

A request's key is the hash of its body and of how often it was asked, so a run that was killed
finds what it paid for, and any other run that asks the same finds it too. Replies are written by
a thread of its own: it commits everything that has come in since the last commit as one
transaction, so that many replies a second share one wait for the disk. Failed requests are never
stored. Keys, headers and addresses of servers are no part of a row.
"""

import asyncio
import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import orjson
import zstandard

from nmoe_data.errors import DataError
from nmoe_data.hydra.client.budget import Usage

CACHE_VERSION = 1
INSERT = "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
TABLE = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    reply BLOB NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cost REAL NOT NULL,
    latency_s REAL NOT NULL,
    attempts INTEGER NOT NULL,
    stored_unix_s REAL NOT NULL
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class StoredReply:
    """What came back for a request, and what it took.

    content, refusal, finish_reason, logprobs: of the first choice, as the server sent them; all
    None if there was no choice. usage: of this request. latency_s: from sending to the whole
    reply; for a batch, nothing. attempts: requests sent until this reply came.
    """

    content: str | None
    refusal: str | None
    finish_reason: str | None
    logprobs: Any
    usage: Usage
    latency_s: float
    attempts: int


def request_key(body: dict[str, Any], attempt: int) -> str:
    """Returns the SHA-256 of a request's body and the number of times it was asked before, hex."""
    content = orjson.dumps([CACHE_VERSION, attempt, body], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(content).hexdigest()


class RequestCache:
    """The replies in one SQLite file; a context manager that ends the writing thread.

    Raises DataError: E-HYDRA-CACHE if the file is damaged or of another program.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: SimpleQueue[_Write | None] = SimpleQueue()
        try:
            self._reader = self._connect()
            self._writer = self._connect()
        except sqlite3.Error as error:
            raise self._problem(error) from None
        self._thread = threading.Thread(target=self._write_all, name="hydra cache", daemon=True)
        self._thread.start()

    def __enter__(self) -> "RequestCache":
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=60.0, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        # Each commit waits for the disk: a reply that was paid survives a power cut.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(TABLE)
        connection.commit()
        return connection

    def get(self, key: str) -> StoredReply | None:
        """Returns the reply to a request, or None if it was never paid.

        Raises DataError: E-HYDRA-CACHE.
        """
        columns = "reply, prompt_tokens, completion_tokens, cost, latency_s, attempts"
        query = f"SELECT {columns} FROM replies WHERE key = ?"
        try:
            row = self._reader.execute(query, (key,)).fetchone()
        except sqlite3.Error as error:
            raise self._problem(error) from None
        if row is None:
            return None
        blob, prompt_tokens, completion_tokens, cost, latency_s, attempts = row
        content, refusal, finish_reason, logprobs = orjson.loads(zstandard.decompress(blob))
        usage = Usage(prompt_tokens, completion_tokens, cost)
        return StoredReply(content, refusal, finish_reason, logprobs, usage, latency_s, attempts)

    async def put(self, key: str, model: str, reply: StoredReply) -> None:
        """Stores a reply; returns when it is on disk.

        Raises DataError: E-HYDRA-CACHE, E-DISK-FULL.
        """
        await self.put_all([(key, model, reply)])

    async def put_all(self, replies: Iterable[tuple[str, str, StoredReply]]) -> None:
        """Stores replies in one transaction; returns when they are on disk.

        Raises DataError: E-HYDRA-CACHE, E-DISK-FULL.
        """
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[None] = loop.create_future()
        rows = [_row(key, model, reply) for key, model, reply in replies]
        self._queue.put(_Write(rows, loop, stored))
        await stored

    def spent(self) -> Usage:
        """Returns what all replies together took.

        Raises DataError: E-HYDRA-CACHE.
        """
        sums = "SUM(prompt_tokens), SUM(completion_tokens), SUM(cost)"
        try:
            prompt, completion, cost = self._reader.execute(
                f"SELECT {sums} FROM replies"
            ).fetchone()
        except sqlite3.Error as error:
            raise self._problem(error) from None
        return Usage(prompt or 0, completion or 0, cost or 0.0)

    def _write_all(self) -> None:
        while (write := self._queue.get()) is not None:
            writes = [write]
            while not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    self._commit(writes)
                    return
                writes.append(following)
            self._commit(writes)

    def _commit(self, writes: "list[_Write]") -> None:
        problem: DataError | None = None
        try:
            with self._writer:
                for write in writes:
                    self._writer.executemany(INSERT, write.rows)
        except sqlite3.Error as error:
            problem = self._problem(error)
        for write in writes:
            write.done(problem)

    def _problem(self, error: sqlite3.Error) -> DataError:
        if "full" in str(error):
            remedy = "free some space and run the same command again to go on"
            return DataError("E-DISK-FULL", f"cannot write {self._path}: {error}", remedy)
        remedy = "move the file away; what was paid is in it, so keep it if it can be mended"
        return DataError("E-HYDRA-CACHE", f"{self._path} cannot be used: {error}", remedy)


@dataclass(frozen=True, slots=True)
class _Write:
    rows: list[tuple[object, ...]]
    loop: asyncio.AbstractEventLoop
    stored: "asyncio.Future[None]"

    def done(self, problem: DataError | None) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._resolve, problem)

    def _resolve(self, problem: DataError | None) -> None:
        if self.stored.done():
            return
        if problem is None:
            self.stored.set_result(None)
        else:
            self.stored.set_exception(problem)


def _row(key: str, model: str, reply: StoredReply) -> tuple[object, ...]:
    fields = [reply.content, reply.refusal, reply.finish_reason, reply.logprobs]
    usage = reply.usage
    return (
        key,
        model,
        zstandard.compress(orjson.dumps(fields)),
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cost,
        reply.latency_s,
        reply.attempts,
        time.time(),
    )
