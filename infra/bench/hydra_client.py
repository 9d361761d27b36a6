"""How many requests a second `hydra label` makes from one process, against a judge with a latency.

    python infra/bench/hydra_client.py --json infra/bench/results/hydra-client-cpu.json

The judge is the tests' server in a process of its own on the same machine, so it takes its part of
the cores. A rate is documents graded over the seconds of the whole run, opening and closing
included. Each repetition begins with an empty cache.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from nmoe_data.hydra.client import JudgeSettings
from nmoe_data.hydra.documents import Document, document_id
from nmoe_data.hydra.rubric import load_rubric
from nmoe_data.hydra.session import grade_documents

SERVER = Path(__file__).parents[2] / "tests" / "support" / "judge_server.py"
# What the server waits before it answers, when it is started as a program.
LATENCY_S = 0.05


def documents(count: int) -> list[Document]:
    """Short documents, no two alike."""
    texts = (f"Note {number}: a router chooses experts for a token." for number in range(count))
    return [
        Document(document_id(text), text, "made", number, "made")
        for number, text in enumerate(texts)
    ]


def rate(count: int, base_url: str) -> float:
    """Documents a second of one run; raises RuntimeError if one was not scored."""
    judge = JudgeSettings("judge", "model", base_url, key_variable=None)
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        done = grade_documents(
            documents(count), [judge], load_rubric("prose"), Path(folder, "requests.sqlite")
        )
        seconds = time.perf_counter() - started_s
    if any(label.status != "scored" for label in done.labels):
        raise RuntimeError("a document was not scored")
    return len(done.labels) / seconds


def main() -> None:
    """Starts the server, repeats, prints the report and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = subprocess.Popen([sys.executable, str(SERVER), "0"], stdout=subprocess.PIPE, text=True)
    load = os.getloadavg()[0]
    try:
        assert server.stdout is not None
        base_url = server.stdout.readline().strip()
        rates = [rate(options.documents, base_url) for _ in range(options.repeats)]
    finally:
        server.terminate()
        server.wait()
    report = {
        "bench": "hydra-client",
        "hardware": {
            "device": platform.processor() or "CPU",
            "cores": len(os.sched_getaffinity(0)),
            "load": load,
            "python": platform.python_version(),
            "openai": importlib.metadata.version("openai"),
            "date": datetime.now(UTC).date().isoformat(),
        },
        "repeats": options.repeats,
        "documents": options.documents,
        "latency_s": LATENCY_S,
        "requests_per_s": statistics.median(rates),
        "requests_per_s_of_each": rates,
    }
    text = json.dumps(report, indent=1)
    print(text)  # noqa: T201 - a program, not a library
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
