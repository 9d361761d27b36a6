"""What can go wrong with a request, each under its own name, and what is done about it.

Network failures send the same request again, under the same idempotency key. A reply that was
paid but holds no judgement is asked for again as a new request. Some failures end the run: going
on could only cost time or money.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from nmoe_data.hydra import reply
from nmoe_data.hydra.labels import FAILED, REFUSED, TOO_LONG, UNPARSABLE

RATE_LIMITED = "rate_limited"
QUOTA = "quota"
SERVER_ERROR = "server_error"
TIMEOUT = "timeout"
CONNECTION = "connection"
REFUSED_BY_JUDGE = reply.REFUSAL_PROSE
CONTENT_FILTER = "content_filter"
CUT = "cut"
TOO_LONG_FOR_MODEL = "too_long"
BAD_REQUEST = "bad_request"
UNAUTHORIZED = "unauthorized"
NO_CHOICES = "no_choices"

MESSAGE_CHARACTERS = 300
REDACTED = "[key]"
LONGEST_RETRY_AFTER_S = 3600.0
TOO_LONG_MESSAGE = re.compile(
    r"context.?(?:length|window|size)|maximum.{0,20}tokens|too many tokens"
    r"|(?:prompt|input) is too long",
    re.IGNORECASE,
)
HEADER_NAMES = re.compile(r"authorization|bearer|x-stainless|idempotency-key", re.IGNORECASE)
QUOTA_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done about a failure.

    status: of a document that ends with it. attempts: requests before it is given up. first_s,
    longest_s: waiting times, doubled from one to the other. stops: ends the run.
    """

    status: str
    attempts: int = 1
    first_s: float = 0.0
    longest_s: float = 0.0
    stops: bool = False

    def delay_s(self, attempt: int, chance: float) -> float:
        """Returns how long to wait after the attempt, from 1; `chance` in [0, 1) spreads it."""
        longest = min(self.longest_s, self.first_s * 2.0 ** (attempt - 1))
        return longest * (0.5 + 0.5 * chance)


POLICIES: Mapping[str, Policy] = {
    RATE_LIMITED: Policy(FAILED, attempts=30, first_s=1.0, longest_s=60.0),
    QUOTA: Policy(FAILED, stops=True),
    SERVER_ERROR: Policy(FAILED, attempts=6, first_s=0.5, longest_s=30.0),
    TIMEOUT: Policy(FAILED, attempts=3, first_s=1.0, longest_s=10.0),
    CONNECTION: Policy(FAILED, attempts=6, first_s=0.5, longest_s=30.0),
    REFUSED_BY_JUDGE: Policy(REFUSED),
    CONTENT_FILTER: Policy(REFUSED),
    CUT: Policy(UNPARSABLE, attempts=2),
    TOO_LONG_FOR_MODEL: Policy(TOO_LONG, attempts=4),
    BAD_REQUEST: Policy(FAILED),
    UNAUTHORIZED: Policy(FAILED, stops=True),
    NO_CHOICES: Policy(UNPARSABLE, attempts=3, first_s=0.5, longest_s=2.0),
    reply.HTML_PAGE: Policy(UNPARSABLE, attempts=3, first_s=0.5, longest_s=2.0),
    **{
        kind: Policy(UNPARSABLE, attempts=3)
        for kind in (
            reply.EMPTY,
            reply.PROSE,
            reply.DUPLICATE_FIELD,
            reply.WRONG_FIELDS,
            reply.WRONG_TYPE,
            reply.OUT_OF_RANGE,
            reply.REASON_FIRST,
            reply.ECHO,
        )
    },
}


class RequestFailure(Exception):
    """A request without a reply.

    kind: one of POLICIES. retry_after_s: what the server asked for. charged: whether the server
    may have charged for it all the same.
    """

    def __init__(
        self,
        kind: str,
        message: str = "",
        retry_after_s: float | None = None,
        charged: bool = False,
    ) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.charged = charged


def failure_of_status(
    status: int, body: Any, headers: Mapping[str, str], secrets: Sequence[str]
) -> RequestFailure:
    """Returns the failure in an HTTP answer that is not 2xx.

    body: the decoded JSON, or anything else. secrets: what must not be in the message.
    """
    error = body.get("error", body) if isinstance(body, dict) else {}
    error = error if isinstance(error, dict) else {"message": error}
    codes = {str(error.get("code")), str(error.get("type"))}
    message = one_line(f"HTTP {status} {error.get('message') or ''}", secrets)
    kind = _kind_of_status(status, codes, message)
    if kind == UNAUTHORIZED or HEADER_NAMES.search(message):
        # Servers repeat parts of the key, or whole headers.
        message = f"HTTP {status}"
    return RequestFailure(kind, message, retry_after_s(headers) if status == 429 else None)


def _kind_of_status(status: int, codes: set[str], message: str) -> str:
    if status == 429:
        return QUOTA if codes & QUOTA_CODES else RATE_LIMITED
    if status in (401, 403):
        return UNAUTHORIZED
    if status == 402:
        return QUOTA
    if status in (408, 409, 425) or status >= 500:
        return SERVER_ERROR
    if "content_filter" in codes:
        return CONTENT_FILTER
    if status == 413 or "context_length_exceeded" in codes or TOO_LONG_MESSAGE.search(message):
        return TOO_LONG_FOR_MODEL
    return BAD_REQUEST


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds that `retry-after-ms` or `Retry-After` (seconds or a date) asks for."""
    milliseconds, value = headers.get("retry-after-ms"), headers.get("retry-after")
    try:
        if milliseconds is not None:
            return max(0.0, float(milliseconds) / 1e3)
        if value is None:
            return None
        if value.strip().replace(".", "", 1).isdecimal():
            return float(value)
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def one_line(text: str, secrets: Sequence[str]) -> str:
    """Returns a text for people: without secrets, on one line, not long."""
    line = " ".join(redact(text, secrets).split())
    return line if len(line) <= MESSAGE_CHARACTERS else line[:MESSAGE_CHARACTERS] + "..."


def redact(text: str, secrets: Sequence[str]) -> str:
    """Returns the text with every secret replaced."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text
