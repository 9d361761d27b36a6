"""The judge for the band, and what may be spent on it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nmoe_data.errors import DataError

if TYPE_CHECKING:
    # Workers import this module and need no client.
    from nmoe_data.hydra.client.settings import JudgeSettings


@dataclass(frozen=True, slots=True)
class Asking:
    """Documents of the band go to `judge` in the order of the corpus, while the budget lasts.

    max_cost: by the judge's prices. max_tokens: of prompts and replies. max_requests: documents
    that are asked about. None is no limit.

    Raises DataError: E-ARGUMENT for a limit that is not above zero.
    """

    judge: "JudgeSettings"
    max_cost: float | None = None
    max_tokens: int | None = None
    max_requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_cost", "max_tokens", "max_requests"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                option = name.replace("_", "-")
                raise DataError("E-ARGUMENT", f"{option} is {value}", "give more than 0")

    def to_json(self) -> dict[str, Any]:
        """Returns what two starts of one run must share: what is asked, and the budget."""
        judge = self.judge
        return {
            "model": judge.model,
            "host": judge.host,
            "schema": judge.schema,
            "logprobs": judge.logprobs,
            "temperature": judge.temperature,
            "reply_tokens": judge.reply_tokens,
            "price_in": judge.price_in,
            "price_out": judge.price_out,
            "max_cost": self.max_cost,
            "max_tokens": self.max_tokens,
            "max_requests": self.max_requests,
        }
