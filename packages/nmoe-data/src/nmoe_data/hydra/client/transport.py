"""One request to one judge, through the openai client with its own retries off.

The answer is read as bytes: the client's models turn strings into numbers and raise a different
exception for each kind of bad reply. Whatever goes wrong leaves here as a RequestFailure that
holds no request, no header and no key, and no chain to an exception that does.
"""

import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from nmoe_data.hydra.client.budget import Usage
from nmoe_data.hydra.client.cache import StoredReply
from nmoe_data.hydra.client.failures import (
    CONNECTION,
    NO_CHOICES,
    TIMEOUT,
    RequestFailure,
    failure_of_status,
    one_line,
    redact,
)
from nmoe_data.hydra.client.settings import JudgeSettings
from nmoe_data.hydra.extras import extra
from nmoe_data.hydra.reply import HTML_PAGE

with extra("hydra"):
    import httpx2
    import openai

CONNECT_TIMEOUT_S = 10.0
# The client's pool looks at all of its connections for every request, so pools are kept small.
CONNECTIONS_PER_POOL = 16
IDEMPOTENCY_HEADER = "Idempotency-Key"
Result = TypeVar("Result")


class Transport:
    """The connections to a judge; close them with `close`.

    secrets: what is never shown.

    Raises DataError: E-HYDRA-KEY.
    """

    def __init__(self, judge: JudgeSettings) -> None:
        self.judge = judge
        self.secrets = judge.secrets()
        self._pools: list[_Pool] = []
        self._tls: ssl.SSLContext | None = None

    async def close(self) -> None:
        """Closes all connections."""
        for pool in self._pools:
            await pool.client.close()

    @contextmanager
    def _client(self) -> Iterator[openai.AsyncOpenAI]:
        """Gives the client of the first pool with a free connection."""
        pool = next((pool for pool in self._pools if pool.used < CONNECTIONS_PER_POOL), None)
        if pool is None:
            self._tls = self._tls or httpx2.create_ssl_context()
            pool = _Pool(_new_client(self.judge, self._tls))
            self._pools.append(pool)
        pool.used += 1
        try:
            yield pool.client
        finally:
            pool.used -= 1

    async def ask(self, body: dict[str, Any], key: str, worst: Usage) -> StoredReply:
        """Sends a chat completion request and returns what came back.

        key: sent as idempotency key, so that a server that knows it charges once. worst: taken for
        the use where the server does not tell.

        Raises RequestFailure.
        """
        headers = {IDEMPOTENCY_HEADER: key, "Content-Type": "application/json"}
        content = orjson.dumps(body)

        async def post(client: openai.AsyncOpenAI) -> httpx2.Response:
            return await client.post(
                "/chat/completions",
                cast_to=httpx2.Response,
                content=content,
                options={"headers": headers},
            )

        started_s = time.monotonic()
        response = await self.call(post)
        latency_s = time.monotonic() - started_s
        try:
            completion = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise RequestFailure(HTML_PAGE) from None
        return self.reply_of(completion, latency_s, worst)

    async def call(self, work: Callable[[openai.AsyncOpenAI], Awaitable[Result]]) -> Result:
        """Returns what `work` returns for a client with a free connection.

        Raises RequestFailure for whatever the client or the server makes of it.
        """
        failure: RequestFailure
        try:
            with self._client() as client:
                return await work(client)
        except openai.APIStatusError as error:
            headers = error.response.headers
            failure = failure_of_status(error.status_code, error.body, headers, self.secrets)
        except (openai.APIConnectionError, httpx2.HTTPError) as error:
            failure = self._network_failure(error)
        except AttributeError:
            # What the client's paging makes of a page of text.
            failure = RequestFailure(HTML_PAGE)
        # Outside of the except block, so that the exception, which knows the request with its
        # headers, is not its context.
        raise failure

    def _network_failure(
        self, error: openai.APIConnectionError | httpx2.HTTPError
    ) -> RequestFailure:
        if isinstance(error, (openai.APITimeoutError, httpx2.TimeoutException)):
            return RequestFailure(TIMEOUT, charged=True)
        cause = error.__cause__ or error
        reason = one_line(str(cause) or type(cause).__name__, self.secrets)
        charged = not isinstance(cause, httpx2.ConnectError)
        return RequestFailure(CONNECTION, reason, charged=charged)

    def reply_of(self, completion: Any, latency_s: float, worst: Usage) -> StoredReply:
        """Returns the reply in the decoded body of a chat completion.

        Raises RequestFailure: no_choices if it is none.
        """
        try:
            choice = completion["choices"][0]
            message = choice["message"]
            return StoredReply(
                content=self._text(message.get("content")),
                refusal=self._text(message.get("refusal")),
                finish_reason=self._text(choice.get("finish_reason")),
                logprobs=_tokens(choice.get("logprobs")),
                usage=self._usage(completion.get("usage"), worst),
                latency_s=latency_s,
                attempts=1,
            )
        except (LookupError, TypeError, AttributeError):
            # The server did its work and may have charged for it.
            raise RequestFailure(NO_CHOICES, charged=True) from None

    def _text(self, value: Any) -> str | None:
        return redact(value, self.secrets) if isinstance(value, str) else None

    def _usage(self, usage: Any, worst: Usage) -> Usage:
        counts = usage if isinstance(usage, dict) else {}
        prompt, completion = counts.get("prompt_tokens"), counts.get("completion_tokens")
        if type(prompt) is not int or type(completion) is not int:
            return worst
        return Usage(prompt, completion, self.judge.cost(prompt, completion))


@dataclass(slots=True)
class _Pool:
    client: openai.AsyncOpenAI
    used: int = 0


def _new_client(judge: JudgeSettings, tls: ssl.SSLContext) -> openai.AsyncOpenAI:
    limits = httpx2.Limits(
        max_connections=CONNECTIONS_PER_POOL, max_keepalive_connections=CONNECTIONS_PER_POOL
    )
    timeout = httpx2.Timeout(judge.timeout_s, connect=min(judge.timeout_s, CONNECT_TIMEOUT_S))
    return openai.AsyncOpenAI(
        api_key=judge.api_key(),
        base_url=judge.base_url,
        max_retries=0,
        timeout=timeout,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits, timeout=timeout, verify=tls),
    )


def _tokens(logprobs: Any) -> Any:
    """Returns what `expected_scores` needs of the log-probabilities, or None."""
    try:
        return [
            {
                "token": token["token"],
                "top_logprobs": [
                    {"token": other["token"], "logprob": other["logprob"]}
                    for other in token["top_logprobs"]
                ],
            }
            for token in logprobs["content"]
        ]
    except (TypeError, KeyError):
        return None
