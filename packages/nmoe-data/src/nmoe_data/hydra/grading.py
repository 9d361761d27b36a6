"""One judge grades one document: the request, its repeats, and the label that comes of it.

A reply is looked for in the cache first. A network failure sends the same request again under the
same key. A reply without a judgement is asked for anew, a little warmer; a reply that was cut gets
twice the room; a document that is too long is halved. A document that still has no scores gets a
label that says why, never a low score.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from nmoe_data.hydra.client.budget import Budget, Usage
from nmoe_data.hydra.client.cache import RequestCache, StoredReply, request_key
from nmoe_data.hydra.client.control import (
    FAILED,
    RunControl,
    RunOver,
    stopping_error,
    waiting_error,
)
from nmoe_data.hydra.client.failures import (
    CONTENT_FILTER,
    CUT,
    LONGEST_RETRY_AFTER_S,
    POLICIES,
    RATE_LIMITED,
    REFUSED_BY_JUDGE,
    TIMEOUT,
    TOO_LONG_FOR_MODEL,
    RequestFailure,
)
from nmoe_data.hydra.client.limit import AdaptiveLimit
from nmoe_data.hydra.client.transport import Transport
from nmoe_data.hydra.documents import Document
from nmoe_data.hydra.labels import SCORED, Label
from nmoe_data.hydra.prompt import PromptSettings, build_prompt, prompt_hash, reply_schema
from nmoe_data.hydra.reply import EMPTY, Grades, ReplyProblem, expected_scores, parse_reply
from nmoe_data.hydra.rubric import Rubric

TOP_LOGPROBS = 10
WARMER = 0.5
HOTTEST = 1.0
MIN_CHARACTERS = 256


@dataclass(slots=True)
class Course:
    """How far the grading of one document is.

    characters: of the document that are shown. reply_tokens: room for the reply. repeats: replies
    without a judgement so far. usage: of its replies. sent: its requests. latency_s: of the last
    reply. halved: times that the document was cut for its length. charged: whether the server may
    have charged for a request without a reply.
    """

    characters: int
    reply_tokens: int
    repeats: int = 0
    usage: Usage = field(default_factory=Usage)
    sent: int = 0
    latency_s: float = 0.0
    halved: int = 0
    charged: bool = False


class Grader:
    """A judge with everything it needs to grade documents by one rubric.

    Its methods may run many at once in one event loop.
    """

    def __init__(
        self,
        transport: Transport,
        rubric: Rubric,
        prompts: PromptSettings,
        cache: RequestCache,
        budget: Budget,
        limit: AdaptiveLimit,
        control: RunControl,
    ) -> None:
        self.judge = transport.judge
        self.rubric = rubric
        self.prompts = prompts
        self._transport = transport
        self._cache = cache
        self._budget = budget
        self._limit = limit
        self._control = control
        self._schema = reply_schema(rubric)
        self._prompt_hash = prompt_hash(rubric, prompts)

    async def grade(self, document: Document) -> Label:
        """Returns the label of a document, scored or not.

        Raises RunOver if the run ends before there is one, DataError where the cache cannot be
        used.
        """
        course = Course(self.prompts.max_characters, self.judge.reply_tokens)
        while True:
            body = self.request(document, course)
            try:
                reply = await self._reply(body, course)
                return self._scored(document, course, reply)
            except ReplyProblem as problem:
                kind = problem.kind
                self._control.events[kind] += 1
                course.repeats += 1
                tries = course.repeats
            except RequestFailure as failure:
                kind = failure.kind
                course.halved += 1
                tries = course.halved
                if kind != TOO_LONG_FOR_MODEL:
                    self._control.give_up(self.judge, failure)
                    return self._label(document, course, POLICIES[kind].status, kind)
            if tries >= POLICIES[kind].attempts or not _adapted(course, kind, len(document.text)):
                return self._label(document, course, POLICIES[kind].status, kind)

    def request(self, document: Document, course: Course) -> dict[str, Any]:
        """Returns the body of the request that a document is at."""
        settings = replace(self.prompts, max_characters=course.characters)
        judge = self.judge
        body: dict[str, Any] = {
            "model": judge.model,
            "messages": list(build_prompt(self.rubric, document, settings).messages),
            judge.reply_limit_field: course.reply_tokens,
        }
        if judge.temperature is not None:
            warmer = WARMER * course.repeats
            body["temperature"] = max(judge.temperature, min(HOTTEST, warmer))
        if judge.schema:
            body["response_format"] = self._schema
        if judge.logprobs:
            body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        return body

    def first_request(self, document: Document) -> tuple[str, dict[str, Any], Usage]:
        """Returns key, body and worst case of the request that a document starts with."""
        course = Course(self.prompts.max_characters, self.judge.reply_tokens)
        body = self.request(document, course)
        return request_key(body, 0), body, self._worst(body, course)

    def _worst(self, body: dict[str, Any], course: Course) -> Usage:
        # No tokenizer makes more tokens than bytes.
        prompt, completion = len(orjson.dumps(body)), course.reply_tokens
        return Usage(prompt, completion, self.judge.cost(prompt, completion))

    async def _reply(self, body: dict[str, Any], course: Course) -> StoredReply:
        key = request_key(body, course.repeats)
        reply = self._cache.get(key) or await self._paid_reply(key, body, course)
        course.usage += reply.usage
        course.sent += reply.attempts
        course.latency_s = reply.latency_s
        return reply

    async def _paid_reply(self, key: str, body: dict[str, Any], course: Course) -> StoredReply:
        self._control.check()
        worst = self._worst(body, course)
        if not await self._budget.reserve(worst):
            self._control.stop(self._budget.limit_name)
            raise RunOver
        course.charged = False
        used = Usage()
        try:
            reply = await self._send_until_answered(key, body, worst, course)
            used = reply.usage
            await self._cache.put(key, self.judge.model, reply)
            return reply
        except (RequestFailure, RunOver):
            # A request that may have been charged has spent its worst case.
            used = worst if course.charged else used
            raise
        finally:
            await self._budget.settle(worst, used)

    async def _send_until_answered(
        self, key: str, body: dict[str, Any], worst: Usage, course: Course
    ) -> StoredReply:
        failed: Counter[str] = Counter()
        while True:
            entered_s = await self._limit.enter()
            try:
                self._control.check()
                self._control.requests += 1
                reply = await self._transport.ask(body, key, worst)
                self._control.replies += 1
                self._limit.answered(entered_s)
                return replace(reply, attempts=1 + failed.total())
            except RequestFailure as met:
                failure = met
            finally:
                self._limit.leave()
            failed[failure.kind] += 1
            course.charged |= failure.charged
            await self._after(failure, failed[failure.kind], entered_s, course, key)

    async def _after(
        self, failure: RequestFailure, times: int, entered_s: float, course: Course, key: str
    ) -> None:
        """Waits before a request is sent again, or raises the failure or RunOver."""
        self._control.meet(self.judge, failure)
        policy = POLICIES[failure.kind]
        wait_s = failure.retry_after_s
        if policy.stops:
            self._control.stop(FAILED, stopping_error(self.judge, failure))
        if wait_s is not None and wait_s > LONGEST_RETRY_AFTER_S:
            self._control.stop(FAILED, waiting_error(self.judge, wait_s))
        self._control.check()
        if failure.kind in (RATE_LIMITED, TIMEOUT):
            self._limit.refused(entered_s, wait_s)
        if not policy.first_s or times >= policy.attempts:
            course.sent += times
            raise failure
        if not wait_s:
            # "Retry-After: 0", or a date in the past, is no leave to ask at once for ever.
            chance = random.Random(f"{key} {times}").random()
            await self._control.sleep(policy.delay_s(times, chance))

    def _scored(self, document: Document, course: Course, reply: StoredReply) -> Label:
        shown = document.text[: course.characters]
        grades = _grades_of(reply, self.rubric, shown)
        expected = None
        if reply.logprobs is not None and reply.content is not None:
            expected = expected_scores(reply.content, reply.logprobs, self.rubric)
        label = self._label(document, course, SCORED, "")
        return replace(label, scores=grades.scores, expected=expected, reason=grades.reason)

    def _label(self, document: Document, course: Course, status: str, detail: str) -> Label:
        return Label(
            document_id=document.id,
            rubric_hash=self.rubric.hash,
            model=self.judge.model,
            prompt_hash=self._prompt_hash,
            scores=None,
            expected=None,
            reason="",
            status=status,
            detail=detail,
            prompt_tokens=course.usage.prompt_tokens,
            completion_tokens=course.usage.completion_tokens,
            cost=course.usage.cost,
            latency_s=course.latency_s,
            attempts=course.sent,
        )


def _grades_of(reply: StoredReply, rubric: Rubric, shown: str) -> Grades:
    """Returns the grades in a reply; raises ReplyProblem where it holds none."""
    if reply.refusal:
        raise ReplyProblem(REFUSED_BY_JUDGE)
    if reply.finish_reason == CONTENT_FILTER:
        raise ReplyProblem(CONTENT_FILTER)
    if reply.finish_reason == "length":
        raise ReplyProblem(CUT)
    if reply.content is None:
        raise ReplyProblem(EMPTY)
    return parse_reply(reply.content, rubric, shown)


def _adapted(course: Course, kind: str, length: int) -> bool:
    """Changes what the next request differs in; False if there is nothing left to change."""
    if kind == CUT:
        course.reply_tokens *= 2
    if kind == TOO_LONG_FOR_MODEL:
        course.characters = min(course.characters, length) // 2
        return course.characters >= MIN_CHARACTERS
    return True
