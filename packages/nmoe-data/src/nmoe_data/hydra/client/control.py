"""What the requests of a run share: counts, and the word that it is over."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from nmoe_data.errors import DataError
from nmoe_data.hydra.client.failures import CONNECTION, QUOTA, RequestFailure
from nmoe_data.hydra.client.settings import JudgeSettings

# So many failures before the first reply: nobody is there, or everything is refused.
HOPELESS = 16

INTERRUPTED = "interrupted"
FAILED = "failed"


class RunOver(Exception):
    """The run ends before this document has a label."""


@dataclass(slots=True)
class RunControl:
    """Whether a run goes on.

    stopped_by: None, "interrupted", "failed", or the name of the budget's limit. error: why it
    failed. events: failures by kind, also those that a repeat made good. requests, replies: sent,
    and answered by a judge. unanswered: what to say if no request was answered, None before any
    was given up.
    """

    stopped_by: str | None = None
    error: DataError | None = None
    events: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    replies: int = 0
    unanswered: DataError | None = None
    _given_up: int = 0
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, by: str, error: DataError | None = None) -> None:
        """Ends the run; the first word counts. What is under way comes in."""
        if self.stopped_by is None:
            self.stopped_by = by
            self.error = error
            self._over.set()

    def check(self) -> None:
        """Raises RunOver if the run has ended."""
        if self.stopped_by is not None:
            raise RunOver

    async def sleep(self, seconds: float) -> None:
        """Waits; raises RunOver as soon as the run has ended."""
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return
        raise RunOver

    def give_up(self, judge: JudgeSettings, failure: RequestFailure) -> None:
        """Counts a request without a reply; ends the run if none has ever had one."""
        self._given_up += 1
        if self.replies:
            return
        self.unanswered = hopeless_error(judge, failure)
        if self._given_up >= HOPELESS:
            self.stop(FAILED, self.unanswered)

    def meet(self, judge: JudgeSettings, failure: RequestFailure) -> None:
        """Counts a failure; ends the run where nobody listens at the judge's address."""
        self.events[failure.kind] += 1
        nobody = failure.kind == CONNECTION and not failure.charged
        if nobody and not self.replies and self.events[CONNECTION] >= HOPELESS:
            self.stop(FAILED, hopeless_error(judge, failure))


def stopping_error(judge: JudgeSettings, failure: RequestFailure) -> DataError:
    """Returns the error for a failure that ends a run at once."""
    again = "run the same command again to go on; what was paid is kept"
    if failure.kind == QUOTA:
        what = f"the account at {judge.host} has no quota left ({failure.message})"
        return DataError("E-HYDRA-QUOTA", what, f"top it up and {again}")
    what = f"{judge.host} does not accept the key for {judge.model} ({failure.message})"
    return DataError(
        "E-HYDRA-UNAUTHORIZED", what, f"check {judge.key_variable or 'the key'}, {again}"
    )


def waiting_error(judge: JudgeSettings, seconds: float) -> DataError:
    """Returns the error for a server that asks to wait longer than a run should."""
    what = f"{judge.host} asks to wait {seconds:,.0f} s"
    return DataError("E-HYDRA-RATE", what, "run the same command again later; it goes on")


def hopeless_error(judge: JudgeSettings, failure: RequestFailure) -> DataError:
    """Returns the error for a judge that has not given one reply."""
    what = f"no reply from {judge.host} to any request for {judge.model} ({failure})"
    remedy = "check the address, the model's name and the options (--no-schema, --no-temperature)"
    return DataError("E-HYDRA-NO-REPLY", what, remedy)
