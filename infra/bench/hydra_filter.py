"""How fast `hydra filter` is on CPUs, beside its own encoder, and how much memory it takes.

    python infra/bench/hydra_filter.py --heads HEADS --json JSON

Documents are pieces of Python's standard library, each made unlike the others by its number. Pairs
are measured one after the other, several times, and medians are told: the encoder alone against the
whole filter, both on one core; one worker against two on all cores. Rates are by the clock and by
the CPU time of all processes, which other work on the machine changes less; those of the filter are
from the first documents to the last, so that starting processes does not count. Then one corpus of
`--large-gb` is filtered while the memory of all processes is watched.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import scipy
from nmoe_data.hydra.encoder import open_encoder
from nmoe_data.hydra.filter import FilterProgress, FilterSettings, filter_corpus
from nmoe_data.hydra.filter.executors import worker_environment
from nmoe_data.hydra.heads import open_heads
from nmoe_data.sources import Document, list_files, read_documents
from threadpoolctl import threadpool_limits

DOCUMENT_CHARACTERS = 6000
BATCH = 256
LOOK_SECONDS = 0.5


def pieces() -> list[str]:
    """Texts of about `DOCUMENT_CHARACTERS` characters."""
    texts = (item.text for item in read_documents(list_files("python-stdlib")) if is_text(item))
    size = DOCUMENT_CHARACTERS
    return [
        text[start : start + size]
        for text in texts
        for start in range(0, len(text), size)
        if len(text) - start >= size // 4
    ]


def is_text(item: object) -> bool:
    return isinstance(item, Document)


def write_corpus(path: Path, texts: list[str], size_bytes: int) -> None:
    """JSON lines of at least so many bytes."""
    number = 0
    with path.open("w") as file:
        while file.tell() < size_bytes:
            for text in texts:
                file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
                number += 1
            file.flush()


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Keep this process, and those it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Rate:
    """Documents per second by the clock, and per second of CPU time."""

    clock: float
    cpu: float


def encoder_rate(texts: list[str], spec: str, seconds: float) -> Rate:
    """The encoder alone, in batches like the filter's."""
    encoder = open_encoder(spec)
    encoder.encode(texts[:BATCH])
    done, begun, cpu_begun = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        start = done % max(len(texts) - BATCH, 1)
        encoder.encode(texts[start : start + BATCH])
        done += BATCH
    return Rate(done / (time.perf_counter() - begun), done / (time.process_time() - cpu_begun))


class Clock:
    """The rate between the first and the last documents that a run reports."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float, int]] = []
        self._looked = 0.0

    def __call__(self, now: FilterProgress) -> None:
        # Looking at all processes takes a while itself.
        if now.documents and time.perf_counter() - self._looked > LOOK_SECONDS:
            self.points.append((time.perf_counter(), cpu_seconds(), now.documents))
            self._looked = time.perf_counter()

    def rate(self) -> Rate:
        (clock, cpu, first), (clock_end, cpu_end, last) = self.points[0], self.points[-1]
        return Rate((last - first) / (clock_end - clock), (last - first) / (cpu_end - cpu))


def cpu_seconds() -> float:
    """CPU time of this process and all below it."""
    ticks = 0
    for pid in family(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _answer(connection: Connection, spec: str, seconds: float) -> None:
    connection.send(encoder_rate(pieces(), spec, seconds))


def worker_encoder_rate(spec: str, seconds: float) -> Rate:
    """The encoder alone, in a process like a worker's: one thread, the same allocator."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, spec, seconds))
    with worker_environment("cpu"):
        process.start()
    rate: Rate = ours.recv()
    process.join()
    return rate


def filter_rate(corpus: Path, heads: Path, folder: Path, workers: int) -> Rate:
    """A run, once it is running."""
    clock = Clock()
    out = folder / "out"
    filter_corpus(str(corpus), heads, out, FilterSettings(workers=workers), progress=clock)
    shutil.rmtree(out)
    return clock.rate()


def pairs(
    first: Callable[[], Rate], second: Callable[[], Rate], repeats: int
) -> tuple[list[Rate], list[Rate]]:
    """Both, one after the other, several times."""
    found: tuple[list[Rate], list[Rate]] = ([], [])
    for _ in range(repeats):
        for measure, values in zip((first, second), found, strict=True):
            values.append(measure())
    return found


class Memory:
    """The greatest resident memory of this process and all below it together, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.peak = max(self.peak, sum(map(resident, family(os.getpid()))))


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = path.read_text().split()
        except OSError:
            continue
        for child in below:
            found += family(int(child))
    return found


def resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def large_run(texts: list[str], heads: Path, folder: Path, size_bytes: int) -> dict[str, Any]:
    """A corpus of so many bytes in one file: time and memory."""
    corpus = folder / "large.jsonl"
    write_corpus(corpus, texts, size_bytes)
    clock, begun = Clock(), time.perf_counter()
    with Memory() as memory:
        result = filter_corpus(
            str(corpus), heads, folder / "large", FilterSettings(workers=2), progress=clock
        )
    row = {
        "name": "large corpus, 2 workers",
        "corpus_bytes": corpus.stat().st_size,
        "documents": result.summary["counts"]["documents"],
        "seconds": time.perf_counter() - begun,
        "documents_per_s": clock.rate().clock,
        "peak_resident_bytes": memory.peak,
    }
    corpus.unlink()
    shutil.rmtree(folder / "large")
    return row


def ratio_row(
    name: str, names: tuple[str, str], values: tuple[list[Rate], list[Rate]]
) -> dict[str, Any]:
    """Medians of a pair, and of its ratios pair by pair."""
    row: dict[str, Any] = {"name": name}
    for kind in ("clock", "cpu"):
        first, second = ([getattr(rate, kind) for rate in rates] for rates in values)
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        row[f"{names[0]}_per_{kind}_s"] = statistics.median(first)
        row[f"{names[1]}_per_{kind}_s"] = statistics.median(second)
        row[f"{kind}_ratio"] = statistics.median(ratios)
        row[f"{kind}_ratios"] = ratios
    return row


def hardware() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
    return {
        "device": model,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--heads", type=Path, required=True, help="calibrated, without a judge head"
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=60, help="of the small corpus")
    parser.add_argument("--large-gb", type=float, default=3.0, help="0 leaves the large one out")
    parser.add_argument("--folder", type=Path, help="for corpora and results")
    arguments = parser.parse_args()
    spec = open_heads(arguments.heads).encoder_spec
    machine, texts = hardware(), pieces()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        corpus = folder / "small.jsonl"
        write_corpus(corpus, texts, arguments.megabytes << 20)

        def filtered(workers: int) -> Rate:
            return filter_rate(corpus, arguments.heads, folder, workers)

        core = {min(os.sched_getaffinity(0))}
        with on_cores(core), threadpool_limits(1):
            alone = pairs(
                lambda: encoder_rate(texts, spec, 6.0), lambda: filtered(1), arguments.repeats
            )
            in_worker = pairs(
                lambda: worker_encoder_rate(spec, 6.0), lambda: filtered(1), arguments.repeats
            )
        workers = pairs(lambda: filtered(1), lambda: filtered(2), arguments.repeats)
        rows = [
            ratio_row("encoder alone and filter, one core", ("encoder", "filter"), alone),
            ratio_row("the same, encoder in a worker's process", ("encoder", "filter"), in_worker),
            ratio_row("one worker and two, all cores", ("one", "two"), workers),
        ]
        if arguments.large_gb:
            rows.append(large_run(texts, arguments.heads, folder, int(arguments.large_gb * 1e9)))
    report = {
        "bench": "hydra-filter",
        "hardware": {**machine, "load_after": os.getloadavg()[0]},
        "repeats": arguments.repeats,
        "encoder": spec,
        "document_characters": DOCUMENT_CHARACTERS,
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
