"""What the tests of nmoe-train share: tiny shards, a tiny model, and a run in this process."""

import json
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nmoe_data.prep import prep
from nmoe_train.config import Config
from nmoe_train.config.load import parse_config
from nmoe_train.data import TrainingData, prepare
from nmoe_train.loop import Observer, Outcome, train
from nmoe_train.model import Transformer, initialise
from nmoe_train.parallel.groups import ALONE
from safetensors.torch import load_file

VOCABULARY = 257
SENTENCE = "a token goes to some experts and the router says which of them and why café 日本"


@dataclass
class Child:
    """A process forked from this one, which spares it the import of torch."""

    pid: int
    folder: Path

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns once the condition holds; fails if the process ends before."""
        while not condition():
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                pytest.fail(f"the process ended too soon: {self.wait()}")
            time.sleep(0.01)

    def wait(self) -> tuple[int, str, str]:
        """Its exit code (minus the signal that killed it), output and errors."""
        _, status = os.waitpid(self.pid, 0)
        out, err = ((self.folder / name).read_text() for name in ("stdout", "stderr"))
        return os.waitstatus_to_exitcode(status), out, err


@pytest.fixture
def fork(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], object]], Child]:
    """Run a function in a process of its own; an exception is a traceback and exit code 99."""

    def start(function: Callable[[], object]) -> Child:
        folder = tmp_path_factory.mktemp("child")
        pid = os.fork()
        if pid:
            return Child(pid, folder)
        code: object = 99
        try:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
            function()
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    return start


@pytest.fixture
def on_ranks(
    fork: Callable[[Callable[[], object]], Child], tmp_path: Path
) -> Callable[[int, Callable[[], Any]], list[Any]]:
    """Run a function on several processes of one gloo group; what it returned on each."""

    def run(ranks: int, function: Callable[[], Any]) -> list[Any]:
        def one(rank: int) -> None:
            torch.set_num_threads(1)
            store = dist.FileStore(str(tmp_path / "store"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            (tmp_path / f"{rank}.pickle").write_bytes(pickle.dumps(function()))
            dist.barrier()

        children = [fork(lambda rank=rank: one(rank)) for rank in range(ranks)]
        for child in children:
            code, _, errors = child.wait()
            assert code == 0, errors
        return [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]

    return run


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Two cores are shared, and one thread makes sums come out the same every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away what the machine's environment may say to a configuration."""
    for name in list(os.environ):
        if name.startswith("NMOE_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a few hundred short documents in bytes, a fifth of them held out."""
    folder = tmp_path_factory.mktemp("shards")
    draw = random.Random(0)
    lines = (
        json.dumps(
            {"text": f"{n} " + " ".join(draw.choices(SENTENCE.split(), k=draw.randint(1, 20)))}
        )
        for n in range(300)
    )
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    prep(folder / "text.jsonl", folder / "data", tokenizer="bytes", held_out=0.2)
    return folder / "data"


@pytest.fixture
def tiny_tree(data_dir: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Make the nested mapping of a tiny configuration; `**{"train.steps": 3}` overrides."""

    def make(**overrides: Any) -> dict[str, Any]:
        tree: dict[str, Any] = {
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "model": {
                "width": 32,
                "layers": 2,
                "dense_layers": 1,
                "heads": 2,
                "dense_width": 48,
                "positions": 64,
                "attention": {
                    "kv_lora_rank": 12,
                    "qk_nope_head_dim": 8,
                    "qk_rope_head_dim": 4,
                    "v_head_dim": 8,
                },
                "moe": {"experts": 4, "top_k": 2, "expert_width": 16, "bias_update_rate": 0.01},
            },
            "data": {"dir": str(data_dir)},
            "train": {"steps": 6, "seq_len": 16, "batch_size": 4},
            "optimizer": {"lr": 3e-3},
            "checkpoint": {"every": 2},
            "eval": {"sequences": 8},
        }
        for path, value in overrides.items():
            *sections, key = path.split(".")
            section = tree
            for name in sections:
                section = section.setdefault(name, {})
            section[key] = value
        return tree

    return make


@pytest.fixture
def tiny(tiny_tree: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    """Make a tiny configuration; `**{"train.steps": 3}` overrides."""
    return lambda **overrides: parse_config(tiny_tree(**overrides), "tiny")


@pytest.fixture
def build() -> Callable[..., Transformer]:
    """Make the initialised model of a configuration."""

    def make(config: Config, dtype: torch.dtype = torch.float32) -> Transformer:
        recompute = config.train.recompute == "layer"
        model = Transformer(config.model, VOCABULARY, dtype=dtype, recompute=recompute)
        initialise(model, config.model, config.run.seed)
        return model

    return make


@pytest.fixture
def data(tiny: Callable[..., Config]) -> TrainingData:
    """The open shards."""
    return prepare(tiny(), lambda _: None)


@pytest.fixture
def run(data: TrainingData) -> Callable[..., Outcome]:
    """Train as configured, in this process; `after_step(record)` is called after each step."""

    def start(
        config: Config,
        after_step: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> Outcome:
        observer = Observer()
        if after_step is not None:
            observer.step = after_step  # type: ignore[method-assign]  # an observer of one hook
        return train(config, data, ALONE, observer, **options)

    return start


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the listed steps of every run of this test a gradient that is not finite."""
    import nmoe_train.loop as loop

    real = loop.train_step

    def start(steps: set[int]) -> None:
        def step(model: Transformer, *rest: Any) -> Any:
            config, tokens = rest[2], rest[3]
            if tokens // config.tokens_per_step not in steps:
                return real(model, *rest)
            weight = model.layers[0].ffn_norm.weight.data
            kept = weight.clone()
            weight[0] = torch.inf
            result = real(model, *rest)
            weight.copy_(kept)
            return result

        monkeypatch.setattr(loop, "train_step", step)

    return start


@pytest.fixture
def rows() -> Callable[..., list[dict[str, Any]]]:
    """Read every row of one attempt's metrics, sealed parts first, then the live file."""
    import pyarrow.parquet as pq

    def read(folder: Path, attempt: int = 1, kind: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part in sorted((folder / "metrics").glob(f"{attempt}-0-[0-9][0-9][0-9]{kind}.parquet")):
            found += [
                {key: value for key, value in row.items() if value is not None}
                for row in pq.read_table(part).to_pylist()
            ]
        live = folder / "metrics" / f"{attempt}-0{kind}.jsonl"
        return found + [json.loads(line) for line in live.read_text().splitlines()]

    return read


@pytest.fixture
def events() -> Callable[[Path], list[dict[str, Any]]]:
    """Read the events of a run."""
    return lambda folder: [
        json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()
    ]


@pytest.fixture
def saved() -> Callable[[Path, int], dict[str, torch.Tensor]]:
    """Read all tensors of a run's checkpoint."""

    def read(folder: Path, step: int) -> dict[str, torch.Tensor]:
        return load_file(folder / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors")

    return read
