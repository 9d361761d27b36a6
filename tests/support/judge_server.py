"""A judge on loopback: an OpenAI-compatible HTTP server with a known rule, and every way to fail.

It reads the document from between the fences of the prompt, scores it by `hidden_scores`, adds
noise that depends on the text alone, and counts what it was asked and what it would charge: one
payment for an idempotency key, however often the request comes; one for each request without a key.
Runs in a thread of the tests (`JudgeServer`), or alone: `python judge_server.py PORT`.
"""

import asyncio
import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

DIMENSIONS = ("helpfulness", "correctness", "coherence", "complexity", "density")
WORD = re.compile(r"[A-Za-z]+")
PROSE_WORDS = frozenset(
    [
        "the",
        "a",
        "an",
        "of",
        "to",
        "is",
        "in",
        "that",
        "for",
        "and",
        "be",
        "it",
        "with",
        "this",
        "are",
        "or",
        "as",
        "not",
        "by",
        "on",
        "can",
        "from",
        "will",
        "which",
        "at",
    ]
)
CODE_WORDS = frozenset(
    [
        "self",
        "def",
        "return",
        "none",
        "true",
        "false",
        "import",
        "class",
        "raise",
        "assert",
        "try",
        "except",
        "if",
        "else",
        "elif",
        "for",
        "while",
        "lambda",
        "yield",
        "pass",
        "with",
    ]
)
# Where a feature passes from one score to the next: the 10, 28, 50, 72 and 90 % quantiles over
# pieces of Python's standard library.
STEPS = (
    (0.0247, 0.0593, 0.1, 0.1555, 0.24),
    (0.047, 0.1011, 0.1438, 0.1918, 0.2529),
    (0.322, 0.342, 0.356, 0.3699, 0.3861),
    (0.0273, 0.046, 0.0627, 0.0827, 0.1187),
    (0.0393, 0.0493, 0.0593, 0.072, 0.0921),
)
FENCED = re.compile(
    r"===== document ([0-9a-f]{32}) begins =====\n(.*)\n===== document \1 ends", re.S
)
PLAIN = re.compile(r"<document>\n(.*)\n</document>", re.S)
COMMAND = re.compile(
    r"ignore (?:the|all|any|every)|disregard|answer 5|scores? of 5|give (?:it )?(?:a )?5|all fives"
    r"|\"helpfulness\": 5",
    re.I,
)
FOREVER = 1 << 30
FAULT_CHARACTERS = 200


def hidden_features(text: str) -> tuple[float, ...]:
    """Five shares: prose words, code words, vowels, digits and brackets, punctuation."""
    words = [word.lower() for word in WORD.findall(text)]
    letters = max(sum(c.isalpha() for c in text), 1)
    return (
        sum(word in PROSE_WORDS for word in words) / max(len(words), 1),
        sum(word in CODE_WORDS for word in words) / max(len(words), 1),
        sum(c in "aeiou" for c in text.lower()) / letters,
        sum(c in "()[]{}_0123456789" for c in text) / max(len(text), 1),
        sum(c in ",.:;='\"" for c in text) / max(len(text), 1),
    )


def hidden_scores(text: str) -> tuple[int, ...]:
    """The rule: each feature's place among its steps, 0 to 5, in the order of DIMENSIONS."""
    features = hidden_features(text)
    return tuple(
        sum(value >= step for step in steps) for value, steps in zip(features, STEPS, strict=True)
    )


def random_scores(text: str) -> tuple[int, ...]:
    """Scores that depend on the text in a way that nothing can learn."""
    return tuple(draw("random", name, text, 6) for name in DIMENSIONS)


def draw(*parts: object) -> int:
    """A number below the last part, from a hash of the others."""
    *seeds, below = parts
    digest = hashlib.blake2b("\0".join(map(str, seeds)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % int(str(below))


def chance(*parts: object) -> float:
    """A number in [0, 1) from a hash of the parts."""
    return draw(*parts, 1 << 40) / (1 << 40)


@dataclass
class Behaviour:
    """How the server judges and misbehaves.

    rule: text to five scores. noise: chance that a score is one off. obedience,
    obedience_defended: chance that a command in the document is obeyed, without and with the
    nonce's fence. faults: share of documents by kind of fault (KINDS). fault_times: how often one
    document meets its fault before it is judged. quota: answers before 429 insufficient_quota.
    rate: answers a second before 429. slots: requests at once before 429. max_characters: of the
    document before 400. api_key: the only one that is let in. batch_polls: before a batch ends.
    batch_share: of its requests that a batch finishes before it expires.
    """

    rule: Callable[[str], tuple[int, ...]] = hidden_scores
    noise: float = 0.1
    seed: int = 0
    latency_s: float = 0.0
    obedience: float = 0.0
    obedience_defended: float = 0.0
    faults: dict[str, float] = field(default_factory=dict)
    fault_times: int = FOREVER
    retry_after: str | None = "0.2"
    quota: int = FOREVER
    rate: float | None = None
    slots: int = FOREVER
    max_characters: int = FOREVER
    api_key: str | None = None
    schema: bool = True
    logprobs: bool = True
    batch_polls: int = 2
    batch_share: float = 1.0


@dataclass(frozen=True)
class Request:
    """One request for a judgement: when it came, its idempotency key, what was answered."""

    time_s: float
    key: str | None
    kind: str
    body: dict[str, Any]


@dataclass
class Answer:
    """An HTTP answer; `hang_s` before it, or the connection is cut."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    kind: str = "judged"
    hang_s: float = 0.0
    cut: bool = False


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def problem(status: int, code: str, message: str, **headers: str) -> Answer:
    kind = "insufficient_quota" if code == "insufficient_quota" else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, as_json(body), named, kind=code)


def scores_json(scores: tuple[object, ...], **extra: object) -> str:
    return json.dumps({**dict(zip(DIMENSIONS, scores, strict=True)), "reason": "By rule.", **extra})


BAD_CONTENTS: dict[str, Callable[[tuple[int, ...], str, str], str]] = {
    "prose": lambda scores, text, prompt: f"I would give it {scores[0]} of 5 for helpfulness.",
    "prose_refusal": lambda scores, text, prompt: "I'm sorry, but I can't help with that.",
    "empty": lambda scores, text, prompt: "",
    "wrong_fields": lambda scores, text, prompt: '```json\n{"score": 5}\n```',
    "out_of_range": lambda scores, text, prompt: scores_json((7, *scores[1:])),
    "boolean": lambda scores, text, prompt: scores_json((True, *scores[1:])),
    "float": lambda scores, text, prompt: scores_json((float(scores[0]), *scores[1:])),
    "string": lambda scores, text, prompt: scores_json((str(scores[0]), *scores[1:])),
    "extra_text": lambda scores, text, prompt: f"{scores_json(scores)}\nHope this helps!",
    "prompt_echo": lambda scores, text, prompt: f"{prompt}\n{scores_json((5, 5, 5, 5, 5))}",
    "two_objects": lambda scores, text, prompt: scores_json((5,) * 5) + scores_json((0,) * 5),
    "duplicate": lambda scores, text, prompt: '{"helpfulness": 5, ' + scores_json(scores)[1:],
    "reason_first": lambda scores, text, prompt: json.dumps(
        {"reason": "By rule.", **dict(zip(DIMENSIONS, scores, strict=True))}
    ),
    "fenced": lambda scores, text, prompt: f"```json\n{scores_json(scores)}\n```",
    "lone_surrogate": lambda scores, text, prompt: scores_json(scores).replace(
        "By rule.", "\\ud800"
    ),
}
HTTP_KINDS = [
    "rate_limited",
    "quota",
    "server_error",
    "crash",
    "timeout",
    "connection",
    "html",
    "refused",
    "content_filter",
    "cut",
    "too_long",
    "bad_request",
    "unauthorized",
    "no_choices",
]
# Answers with status 200 that are no completion.
UNPAID_KINDS = ("html", "no_choices", "connection")
KINDS = (*BAD_CONTENTS, *HTTP_KINDS)


class JudgeServer:
    """The server; a context manager that runs it in a thread of its own.

    behaviour may be changed while it runs. requests: what came, in order. payments: by idempotency
    key (or a number of their own without one).
    """

    def __init__(self, behaviour: Behaviour | None = None, port: int = 0) -> None:
        self.behaviour = behaviour or Behaviour()
        self.port = port
        self.requests: list[Request] = []
        self.payments: Counter[str] = Counter()
        self.open = 0
        self.most_open = 0
        self.early = 0
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self._met: Counter[str] = Counter()
        self._answers: dict[str, Answer] = {}
        self._recent: list[float] = []
        self._closed_from = 0.0
        self._closed_until = 0.0
        self._ready = threading.Event()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def kinds(self) -> Counter[str]:
        """How many requests were answered in which way."""
        return Counter(request.kind for request in self.requests)

    def __enter__(self) -> "JudgeServer":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        await self.start()
        await self._end.wait()
        self._server.close()

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._connection, "127.0.0.1", self.port, limit=1 << 26, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._ready.set()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                pairs = (line.split(":", 1) for line in head[1:] if line)
                headers = {name.lower(): value.strip() for name, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                answer = await self._answer(method, path, headers, body)
                await asyncio.sleep(answer.hang_s)
                if answer.cut:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
                    break
                writer.write(_http(answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client went away, or the server ends
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        expected = self.behaviour.api_key
        if expected is not None and headers.get("authorization") != f"Bearer {expected}":
            given = headers.get("authorization", "none")
            return problem(401, "invalid_api_key", f"Incorrect API key provided: {given}.")
        if path == "/v1/chat/completions":
            return await self._chat(headers, json.loads(body))
        return self._batch_route(method, path, headers, body)

    async def _chat(self, headers: dict[str, str], body: dict[str, Any]) -> Answer:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        now = time.monotonic()
        self.early += self._closed_from < now < self._closed_until
        key = headers.get("idempotency-key")
        try:
            refused = self._limited(now)
            if refused is None:
                await asyncio.sleep(self.behaviour.latency_s)
            answer = refused or self._paid(key, body, headers)
            self.requests.append(Request(now, key, answer.kind, body))
            return answer
        finally:
            self.open -= 1

    def _limited(self, now: float) -> Answer | None:
        behaviour = self.behaviour
        self._recent = [at for at in self._recent if now - at < 1.0]
        crowded = self.open > behaviour.slots
        if crowded or (behaviour.rate is not None and len(self._recent) >= behaviour.rate):
            return self._too_many(now)
        self._recent.append(now)
        return None

    def _too_many(self, now: float) -> Answer:
        wait = self.behaviour.retry_after
        if wait is None:
            return problem(429, "rate_limit_exceeded", "Too many requests.")
        # From when the answer must have come, until a little before the client's clock has run out.
        self._closed_from = now + min(0.05, float(wait) / 2)
        self._closed_until = max(self._closed_until, now + float(wait) * 0.95)
        return problem(429, "rate_limit_exceeded", "Too many requests.", retry_after=wait)

    def _paid(self, key: str | None, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """The answer to a request, charged unless this key was charged before."""
        if key is not None and key in self._answers:
            return self._answers[key]
        answer = self._judge(body, headers)
        if answer.status == 200 and answer.kind not in UNPAID_KINDS:
            self.payments[key or f"unkeyed-{len(self.requests)}"] = 1
            if key is not None:
                # It has been judged; whoever asks again need not wait, unless the fault stays.
                stays = self.behaviour.fault_times == FOREVER
                self._answers[key] = answer if stays else replace(answer, hang_s=0.0)
        return answer

    def fault_of(self, text: str) -> str | None:
        """The fault that a document meets, by its start: cut shorter, it meets the same one."""
        at = chance("fault", self.behaviour.seed, text[:FAULT_CHARACTERS])
        for kind, share in self.behaviour.faults.items():
            if at < share:
                return kind
            at -= share
        return None

    def _judge(self, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        prompt = body["messages"][-1]["content"]
        text, defended = find_document(prompt)
        if sum(self.payments.values()) >= self.behaviour.quota:
            return problem(429, "insufficient_quota", "You exceeded your current quota.")
        if not self.behaviour.schema and "response_format" in body:
            message = "response_format json_schema is not supported"
            return problem(400, "unsupported_parameter", message)
        if len(text) > self.behaviour.max_characters:
            return problem(400, "context_length_exceeded", "This model's maximum context length")
        kind = self.fault_of(text)
        start = text[:FAULT_CHARACTERS]
        if kind is not None and self._met[start] < self.behaviour.fault_times:
            self._met[start] += 1
            return self._fault(kind, text, body, headers)
        return self._completion(scores_json(self.scores(text, defended, body["model"])), body)

    def scores(self, text: str, defended: bool, model: str) -> tuple[int, ...]:
        """The rule with this model's noise, or fives where a command was obeyed."""
        behaviour = self.behaviour
        obedience = behaviour.obedience_defended if defended else behaviour.obedience
        if COMMAND.search(text) and chance("obey", behaviour.seed, model, text) < obedience:
            return (5,) * len(DIMENSIONS)
        rule = behaviour.rule(text)
        return tuple(map(int, (self._noisy(n, score, model, text) for n, score in enumerate(rule))))

    def _noisy(self, number: int, score: int, model: str, text: str) -> int:
        if chance("noise", self.behaviour.seed, model, number, text) >= self.behaviour.noise:
            return score
        return min(5, max(0, score + (1 if draw("sign", number, model, text, 2) else -1)))

    def _fault(self, kind: str, text: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        scores = self.behaviour.rule(text)
        if kind in BAD_CONTENTS:
            prompt = body["messages"][-1]["content"]
            return self._completion(BAD_CONTENTS[kind](scores, text, prompt), body, kind=kind)
        page = f"<html><body><h1>Oops</h1><pre>{headers}</pre></body></html>".encode()
        html = {"content-type": "text/html"}
        return {
            "rate_limited": lambda: self._too_many(time.monotonic()),
            "quota": lambda: problem(429, "insufficient_quota", "You exceeded your quota."),
            "server_error": lambda: problem(500, "server_error", f"failed: {headers}"),
            "crash": lambda: Answer(502, page, html, kind="crash"),
            "timeout": lambda: self._hang(body, scores),
            "connection": lambda: Answer(kind="connection", cut=True),
            "html": lambda: Answer(200, page, html, kind="html"),
            "refused": lambda: self._completion(
                None, body, kind=kind, refusal="I cannot judge it."
            ),
            "content_filter": lambda: self._completion("", body, kind=kind, finish=kind),
            "cut": lambda: self._completion(
                scores_json(scores)[:40], body, kind=kind, finish="length"
            ),
            "too_long": lambda: problem(400, "context_length_exceeded", f"too long: {headers}"),
            "bad_request": lambda: problem(400, "invalid_value", f"bad request: {headers}"),
            "unauthorized": lambda: problem(401, "invalid_api_key", f"Incorrect key: {headers}"),
            "no_choices": lambda: Answer(200, as_json({"id": "x", "choices": []}), kind=kind),
        }[kind]()

    def _hang(self, body: dict[str, Any], scores: tuple[int, ...]) -> Answer:
        answer = self._completion(scores_json(scores), body, kind="timeout")
        answer.hang_s = 30.0
        return answer

    def _completion(
        self,
        content: str | None,
        body: dict[str, Any],
        kind: str = "judged",
        finish: str = "stop",
        refusal: str | None = None,
    ) -> Answer:
        message = {"role": "assistant", "content": content, "refusal": refusal}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
        if body.get("logprobs") and self.behaviour.logprobs and content is not None:
            choice["logprobs"] = {"content": token_probabilities(content)}
        prompt_bytes = sum(len(message["content"].encode()) for message in body["messages"])
        used = {
            "prompt_tokens": prompt_bytes // 4,
            "completion_tokens": len(content or "") // 4 + 1,
        }
        completion = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": {**used, "total_tokens": sum(used.values())},
        }
        return Answer(200, as_json(completion), {"content-type": "application/json"}, kind=kind)

    def _batch_route(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        parts = path.split("?")[0].removeprefix("/v1/").split("/")
        match (method, parts):
            case ("POST", ["files"]):
                return self._new_file(_file_part(headers, body))
            case ("GET", ["files", name, "content"]):
                return Answer(200, self.files[name]) if name in self.files else _missing(name)
            case ("POST", ["batches"]):
                return self._new_batch(json.loads(body))
            case ("GET", ["batches"]):
                listed = list(self.batches.values())[::-1]
                return Answer(200, as_json({"object": "list", "data": listed, "has_more": False}))
            case ("GET", ["batches", name]) if name in self.batches:
                return Answer(200, as_json(self._poll(self.batches[name])))
        return _missing(path)

    def _new_file(self, content: bytes) -> Answer:
        name = f"file-{len(self.files)}"
        self.files[name] = content
        described = {
            "id": name,
            "object": "file",
            "bytes": len(content),
            "created_at": 1,
            "filename": "requests.jsonl",
            "purpose": "batch",
            "status": "processed",
        }
        return Answer(200, as_json(described))

    def _new_batch(self, body: dict[str, Any]) -> Answer:
        name = f"batch-{len(self.batches)}"
        self.batches[name] = {
            "id": name,
            "object": "batch",
            "endpoint": body["endpoint"],
            "input_file_id": body["input_file_id"],
            "completion_window": body["completion_window"],
            "status": "validating",
            "created_at": int(time.time()),
            "metadata": body.get("metadata"),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "polls": 0,
        }
        return Answer(200, as_json(self.batches[name]))

    def _poll(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch["polls"] += 1
        if batch["polls"] == 1:
            batch["status"] = "in_progress"
        if batch["polls"] == self.behaviour.batch_polls:
            self._finish(batch)
        return batch

    def _finish(self, batch: dict[str, Any]) -> None:
        lines = [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines()]
        share = self.behaviour.batch_share
        done, errors = [], []
        for line in reversed(lines):  # the order of the results is not that of the requests
            if chance("expired", line["custom_id"]) >= share:
                error = {"code": "batch_expired", "message": "not executed in time"}
                errors.append({"custom_id": line["custom_id"], "response": None, "error": error})
                continue
            answer = self._judge(line["body"], {})
            self.requests.append(
                Request(time.monotonic(), line["custom_id"], answer.kind, line["body"])
            )
            if answer.status == 200:
                self.payments[line["custom_id"]] += 1
            if answer.kind == "html":
                answer = problem(500, "server_error", "not a completion")
            result = {
                "id": "r",
                "custom_id": line["custom_id"],
                "response": {
                    "status_code": answer.status,
                    "request_id": "q",
                    "body": json.loads(answer.body or b"{}"),
                },
                "error": None,
            }
            (done if answer.status == 200 else errors).append(result)
        batch["status"] = "completed" if share >= 1.0 else "expired"
        for field_name, rows in (("output_file_id", done), ("error_file_id", errors)):
            if rows:
                content = b"".join(as_json(row) + b"\n" for row in rows)
                batch[field_name] = json.loads(self._new_file(content).body)["id"]


def find_document(prompt: str) -> tuple[str, bool]:
    """The document in a prompt, and whether it stands in a nonce's fence with a reminder after."""
    fenced = FENCED.search(prompt)
    if fenced is not None:
        reminded = fenced.group(1) in prompt[fenced.end() + len("ing =====") :]
        return fenced.group(2), reminded
    plain = PLAIN.search(prompt)
    assert plain is not None, "the prompt holds no document"
    return plain.group(1), False


def token_probabilities(content: str) -> list[dict[str, Any]]:
    """Tokens of the reply; at a digit d: 80 % d and 20 % its neighbour towards the middle."""
    tokens = re.findall(r"\d|[^\d]+", content)
    return [
        {"token": token, "logprob": 0.0, "top_logprobs": _alternatives(token)} for token in tokens
    ]


def _alternatives(token: str) -> list[dict[str, Any]]:
    if not token.isdigit():
        return [{"token": token, "logprob": 0.0}]
    other = int(token) + (1 if int(token) < 3 else -1)
    return [
        {"token": token, "logprob": -0.2231435513142097},
        {"token": str(other), "logprob": -1.6094379124341003},
        {"token": "x", "logprob": -12.0},
    ]


def _missing(what: str) -> Answer:
    return problem(404, "not_found", f"there is no {what}")


def _file_part(headers: dict[str, str], body: bytes) -> bytes:
    boundary = headers["content-type"].split("boundary=")[1].encode()
    for part in body.split(b"--" + boundary):
        head, _, content = part.partition(b"\r\n\r\n")
        if b"filename=" in head:
            return content.removesuffix(b"\r\n")
    raise AssertionError("no file in the form")


def _http(answer: Answer) -> bytes:
    headers = {"content-type": "application/json", **answer.headers}
    headers["content-length"] = str(len(answer.body))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} X\r\n{head}\r\n".encode("latin-1") + answer.body


async def _serve(port: int) -> None:
    server = JudgeServer(Behaviour(latency_s=0.05), port)
    await server.start()
    sys.stdout.write(f"{server.base_url}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
