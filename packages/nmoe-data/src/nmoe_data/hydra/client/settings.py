"""Which judge is asked, how, and at what price."""

import math
import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from nmoe_data.errors import DataError

DEFAULT_BASE_URL = "https://api.openai.com/v1"
DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
OPENAI_HOST = "api.openai.com"
# What the client sends where a server wants no key; the header cannot be left empty.
NO_KEY = "none"
TOKENS_PER_PRICE = 1_000_000


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """One judge.

    name: what the user calls it. model, base_url: where it is. key_variable: the environment
    variable that holds its key; None sends none. schema: hold the server to the form of the reply.
    logprobs: ask for log-probabilities. temperature: None leaves it out of requests. reply_tokens:
    most tokens of a reply. timeout_s: of one request. concurrency: most requests at once.
    price_in, price_out: per million tokens, at least 0.

    Raises DataError: E-ARGUMENT for a base URL or a price that is none.
    """

    name: str
    model: str
    base_url: str = field(default=DEFAULT_BASE_URL, repr=False)
    key_variable: str | None = DEFAULT_KEY_VARIABLE
    schema: bool = True
    logprobs: bool = False
    temperature: float | None = 0.0
    reply_tokens: int = 512
    timeout_s: float = 120.0
    concurrency: int = 256
    price_in: float = 0.0
    price_out: float = 0.0
    host: str = field(init=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            port = f":{parts.port}" if parts.port else ""
        except ValueError:
            parts, port = urlsplit(""), ""
        if parts.scheme not in ("http", "https") or not parts.hostname:
            # The URL itself is not shown: it may hold a password.
            raise DataError(
                "E-ARGUMENT",
                f"the base URL of the judge {self.name} is no http or https address",
                "give one such as http://localhost:8000/v1",
            )
        if not (0.0 <= self.price_in < math.inf and 0.0 <= self.price_out < math.inf):
            what = f"the prices of the judge {self.name} are {self.price_in} and {self.price_out}"
            raise DataError("E-ARGUMENT", what, "give two numbers >= 0, per million tokens")
        object.__setattr__(self, "host", f"{parts.hostname}{port}")

    @property
    def reply_limit_field(self) -> str:
        """The field that limits a reply; OpenAI's newer models refuse the one others know."""
        return "max_completion_tokens" if self.host == OPENAI_HOST else "max_tokens"

    def api_key(self) -> str:
        """Returns the key from the environment.

        Raises DataError: E-HYDRA-KEY if the variable is not set or cannot be a header.
        """
        if self.key_variable is None:
            return NO_KEY
        key = os.environ.get(self.key_variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            what = "is not set" if not key else "holds characters that no key has"
            raise DataError(
                "E-HYDRA-KEY",
                f"the environment variable {self.key_variable} {what}",
                "put the server's key in it, name another with --api-key-env, or give --no-key",
            )
        return key

    def secrets(self) -> list[str]:
        """Returns what must never be shown: the key, and a password in the base URL.

        Raises DataError: E-HYDRA-KEY.
        """
        parts = urlsplit(self.base_url)
        key = None if self.key_variable is None else self.api_key()
        return [secret for secret in (key, parts.password, parts.query) if secret]

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns what so many tokens cost."""
        total = prompt_tokens * self.price_in + completion_tokens * self.price_out
        return total / TOKENS_PER_PRICE
