"""A budget that holds: the worst case is set aside before a request, the true use settled after.

No request is sent that could pass the limit, whatever the server answers. What is set aside comes
back when a request settles, so the run stops only when not even one more request fits.
"""

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of requests and replies, and their cost."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )


class Budget:
    """What may be spent; None is no limit.

    spent: settled so far, in earlier runs too. exhausted: a request did not fit although none was
    under way. limit_name: the limit that it did not fit in.
    """

    def __init__(
        self, max_cost: float | None = None, max_tokens: int | None = None, spent: Usage = Usage()
    ) -> None:
        self.max_cost = max_cost
        self.max_tokens = max_tokens
        self.spent = spent
        self.exhausted = False
        self._reserved: list[Usage] = []
        self._reserved_cost = 0.0
        self._reserved_tokens = 0
        self._changed = asyncio.Condition()

    @property
    def limit_name(self) -> str:
        """The option that sets the limit that is nearest."""
        if self.max_cost is None:
            return "max-tokens"
        cost_share = self.spent.cost / self.max_cost if self.max_cost else 1.0
        if self.max_tokens is None or cost_share >= self.spent.tokens / max(self.max_tokens, 1):
            return "max-cost"
        return "max-tokens"

    async def reserve(self, worst: Usage) -> bool:
        """Sets the worst case of a request aside; False if the budget has no room for it."""
        async with self._changed:
            while not self.exhausted and not self.fits(worst):
                if not self._reserved:
                    self.exhausted = True
                    self._changed.notify_all()
                    break
                await self._changed.wait()
            if self.exhausted:
                return False
            self.hold(worst)
            return True

    async def settle(self, worst: Usage, actual: Usage) -> None:
        """Gives what was set aside back and books what was used."""
        async with self._changed:
            self._reserved.remove(worst)
            self._reserved_tokens -= worst.tokens
            # Summed anew, so that rounding cannot add up.
            self._reserved_cost = sum(usage.cost for usage in self._reserved)
            self.spent += actual
            self._changed.notify_all()

    def fits(self, worst: Usage) -> bool:
        """Tells whether a worst case could be set aside now."""
        cost = self.spent.cost + self._reserved_cost + worst.cost
        tokens = self.spent.tokens + self._reserved_tokens + worst.tokens
        return (self.max_cost is None or cost <= self.max_cost) and (
            self.max_tokens is None or tokens <= self.max_tokens
        )

    def hold(self, worst: Usage) -> None:
        """Sets a worst case aside without asking; for batches, which are under way for hours."""
        self._reserved.append(worst)
        self._reserved_cost += worst.cost
        self._reserved_tokens += worst.tokens
