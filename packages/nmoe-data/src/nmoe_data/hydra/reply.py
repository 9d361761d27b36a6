"""From a judge's reply to its scores, strictly: one JSON object, exactly the rubric's fields.

Scores are whole numbers from 0 to 5, never booleans, floats or strings; they come before the
reason. Around the object there may be a code fence, and before it a closed `<think>` block;
anything else is no reply. An object that stands in the document is an echo, not a judgement.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from nmoe_data.hydra.rubric import MAX_SCORE, REASON_FIELD, Rubric

THINKING = re.compile(r"\A\s*<think>(?:(?!<think>|</think>).)*</think>", re.DOTALL)
FENCED = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n[ \t]*```\Z", re.DOTALL)
HTML = re.compile(r"\A\s*(?:<!doctype html|<html|<head|<body)", re.IGNORECASE)
REFUSAL = re.compile(
    r"\A\W*(?:i\W?m (?:very )?sorry|sorry|i (?:can\W?t|cannot|am unable|am not able|won\W?t|must "
    r"decline)|i\W?m (?:unable|not able)|unfortunately,? i (?:can\W?t|cannot)|as an ai\b)",
    re.IGNORECASE,
)
EMPTY = "empty"
HTML_PAGE = "html"
PROSE = "prose"
REFUSAL_PROSE = "refused"
DUPLICATE_FIELD = "duplicate_field"
WRONG_FIELDS = "wrong_fields"
WRONG_TYPE = "wrong_type"
OUT_OF_RANGE = "out_of_range"
REASON_FIRST = "reason_first"
ECHO = "echo"


@dataclass(frozen=True, slots=True)
class Grades:
    """Scores in the rubric's order, and the judge's sentence."""

    scores: tuple[int, ...]
    reason: str


class ReplyProblem(Exception):
    """A reply that holds no judgement; `kind` says in one word why."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def parse_reply(content: str, rubric: Rubric, document: str) -> Grades:
    """Returns the grades in a reply.

    document: the text that was graded; an object that stands in it is not taken for a reply.

    Raises ReplyProblem: one of the kinds above.
    """
    body = THINKING.sub("", content, count=1).strip()
    if not body:
        raise ReplyProblem(EMPTY)
    fenced = FENCED.match(body)
    body = fenced.group(1).strip() if fenced else body
    if not body.startswith("{"):
        raise ReplyProblem(_kind_of_prose(body))
    fields = _load(body)
    grades = _grades(fields, rubric)
    if _without_space(body) in _without_space(document):
        raise ReplyProblem(ECHO)
    return grades


def _kind_of_prose(body: str) -> str:
    if HTML.match(body):
        return HTML_PAGE
    return REFUSAL_PROSE if REFUSAL.match(body) else PROSE


def _load(body: str) -> dict[str, Any]:
    try:
        # It starts with a brace, so it is an object or an error.
        return dict(json.loads(body, object_pairs_hook=_unique_fields))
    except (ValueError, RecursionError):
        raise ReplyProblem(PROSE) from None


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ReplyProblem(DUPLICATE_FIELD)
    return fields


def _grades(fields: dict[str, Any], rubric: Rubric) -> Grades:
    if fields.keys() != {*rubric.names, REASON_FIELD}:
        raise ReplyProblem(WRONG_FIELDS)
    scores = tuple(fields[name] for name in rubric.names)
    reason = fields[REASON_FIELD]
    # Exactly int: a bool is one for isinstance.
    if any(type(score) is not int for score in scores) or not isinstance(reason, str):
        raise ReplyProblem(WRONG_TYPE)
    if any(not 0 <= score <= MAX_SCORE for score in scores):
        raise ReplyProblem(OUT_OF_RANGE)
    if next(reversed(fields)) != REASON_FIELD:
        raise ReplyProblem(REASON_FIRST)
    # JSON can hold half of a surrogate pair, UTF-8 cannot.
    return Grades(scores, reason.encode(errors="replace").decode())


def _without_space(text: str) -> str:
    return "".join(text.split())


def expected_scores(content: str, tokens: Any, rubric: Rubric) -> tuple[float, ...] | None:
    """Returns the mean score per dimension under the judge's own probabilities.

    content: a reply that `parse_reply` takes. tokens: the `logprobs.content` of the server, a list
    of tokens with `token` and `top_logprobs`. E = sum of v p(v) over the digits v = 0..5 among the
    alternatives at the place of the digit, p renormalised over them (Liu et al. 2023, G-Eval).
    None if the tokens do not spell the content up to the last score, or a digit has no
    alternatives.
    """
    try:
        starts = _digit_starts(content, rubric)
        spelled = "".join(token["token"] for token in tokens)
        if starts is None or spelled[: max(starts) + 1] != content[: max(starts) + 1]:
            return None
        return tuple(_expected_at(tokens, start) for start in starts)
    except (TypeError, KeyError, LookupError, ValueError):
        return None


def _digit_starts(content: str, rubric: Rubric) -> list[int] | None:
    """Returns where each score's digit stands.

    A quote inside a JSON string is escaped, so `"name":` can only be a field.
    """
    starts = []
    for name in rubric.names:
        found = list(re.finditer(rf'"{name}"\s*:\s*(\d)', content))
        if len(found) != 1:
            return None
        starts.append(found[0].start(1))
    return starts


def _expected_at(tokens: list[dict[str, Any]], start: int) -> float:
    at = 0
    for token in tokens:
        text = token["token"]
        if at <= start < at + len(text):
            return _expected(text, start - at, token["top_logprobs"])
        at += len(text)
    raise LookupError("no token at the digit")


def _expected(text: str, place: int, alternatives: list[dict[str, Any]]) -> float:
    weights = [0.0] * (MAX_SCORE + 1)
    for alternative in alternatives:
        other = alternative["token"]
        same_frame = other[:place] == text[:place] and other[place + 1 :] == text[place + 1 :]
        digit = other[place : place + 1]
        if same_frame and digit.isdecimal() and digit.isascii() and int(digit) <= MAX_SCORE:
            weights[int(digit)] += math.exp(alternative["logprob"])
    total = sum(weights)
    if not total > 0.0:
        raise ValueError("no alternative is a score")
    return sum(score * weight for score, weight in enumerate(weights)) / total
