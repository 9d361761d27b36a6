"""The training loop: resume, step, record, save, validate, leave when asked to.

Everything that a step depends on is a function of (seed, step) or stands in the checkpoint, so a
run that was stopped anywhere goes on bitwise as if it had not been. SIGINT and SIGTERM end the run
after the current step, with a checkpoint; a second one ends it at once.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from nmoe_data.loader import Loader

from nmoe_train.checkpoint import (
    gather_state,
    newest_sound_checkpoint,
    restore_state,
    write_checkpoint,
)
from nmoe_train.config import Config
from nmoe_train.config.fingerprint import fingerprint, result_fields
from nmoe_train.data import TrainingData
from nmoe_train.errors import TrainError
from nmoe_train.eval import validation_loss
from nmoe_train.files import disk_errors
from nmoe_train.model import Transformer, initialise
from nmoe_train.optim import build_optimizer
from nmoe_train.parallel import Layout
from nmoe_train.step import step_record, train_step
from nmoe_train.telemetry import MetricsWriter, RunFolder, peak_flops, training_flops_per_token
from nmoe_train.telemetry.timers import StageTimer

# Steps in a row without a finite gradient after which going on is pointless.
MOST_SKIPPED_STEPS = 10


class Observer:
    """What the loop tells its caller; the base class keeps silent."""

    def message(self, text: str) -> None:
        """A line for the user."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts after `step` of `steps` steps."""

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""


@dataclass
class Outcome:
    """How a run ended: a status of run.json, the step it is at, and the held-out loss if known."""

    status: str
    step: int
    validation_loss: float | None
    model: Transformer
    stopped_by: signal.Signals | None = None


def pick_device(name: str) -> torch.device:
    """The device that `run.device` names. Raises TrainError `E-DEVICE` if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainError("E-DEVICE", "no CUDA device is usable here", 'set run.device = "cpu"')
    return torch.device(name)


def train(
    config: Config,
    data: TrainingData,
    layout: Layout,
    observer: Observer,
    *,
    allow_changes: bool = False,
) -> Outcome:
    """Runs the configured training from its newest checkpoint, or from the start, to its end.

    Raises TrainError when the run folder is in use or cannot be written, when no checkpoint is
    sound, or when the configuration is not the checkpoint's (unless `allow_changes`).
    """
    with disk_errors("training", config.run.dir):
        folder = RunFolder(config.run.dir)
        try:
            return _Training(config, data, layout, observer, folder).run(allow_changes)
        finally:
            folder.release()


class _Training:
    """A run in progress: the model, its optimizer, and where it is."""

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        layout: Layout,
        observer: Observer,
        folder: RunFolder,
    ) -> None:
        self.config, self.data, self.layout = config, data, layout
        self.observer, self.folder = observer, folder
        self.device = pick_device(config.run.device)
        vocab_size = config.model.vocab_size or data.tokenizer.vocab_size
        if vocab_size < data.tokenizer.vocab_size:
            raise TrainError(
                "E-CONFIG",
                f"model.vocab_size: {vocab_size} rows for a tokenizer of "
                f"{data.tokenizer.vocab_size} ids",
                "raise it, or leave it out to follow the tokenizer",
            )
        dtype = torch.bfloat16 if config.precision.dtype == "bf16" else torch.float32
        recompute = config.train.recompute == "layer"
        self.model = Transformer(config.model, vocab_size, dtype=dtype, recompute=recompute)
        initialise(self.model, config.model, config.run.seed)
        self.model.to(self.device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        seq_len, seed = config.train.seq_len, config.run.seed
        self.loader = Loader(data.train, seq_len=seq_len, seed=seed)
        self.held_out = Loader(data.held_out, seq_len=seq_len, seed=seed)
        self.flops = training_flops_per_token(config.model, vocab_size, seq_len)
        self.peak = peak_flops(self.device, config.telemetry.peak_tflops)
        self.fields = result_fields(config, data.fingerprint)
        self.step = 0
        self.updates = 0
        self.skipped_in_a_row = 0
        self.checkpoint_ms: float | None = None
        self.signal: signal.Signals | None = None

    def run(self, allow_changes: bool) -> Outcome:
        problems = self._resume(allow_changes)
        steps = self.config.train.steps
        if self.step >= steps and self.folder.completed:
            self.observer.message(f"the run is already complete at step {self.step}")
            return Outcome("completed", self.step, self._validate(), self.model)
        self.folder.begin(self.step, **self._description())
        for problem in problems:
            self.folder.event("fault", step=self.step, what=problem)
        metrics = MetricsWriter(
            self.folder.metrics,
            self.folder.attempt,
            self.layout.rank,
            self.config.telemetry.seal_every,
        )
        try:
            with self._signals():
                validation = self._steps(metrics)
        except BaseException as error:
            # A full disk may refuse these too; the error itself is what the user must see.
            with contextlib.suppress(OSError):
                self.folder.event("fault", step=self.step, what=str(error) or type(error).__name__)
                self.folder.end("failed")
            raise
        metrics.close()
        status = "completed" if self.step >= steps else "interrupted"
        if status == "completed" and validation is None:
            validation = self._validate()
        self.folder.end(status, **({} if validation is None else {"loss/validation": validation}))
        stopped_by = self.signal if status == "interrupted" else None
        return Outcome(status, self.step, validation, self.model, stopped_by)

    def _steps(self, metrics: MetricsWriter) -> float | None:
        """Steps until the end or a signal; the validation loss of the last step, if it had one."""
        steps, every = self.config.train.steps, self.config.checkpoint.every
        timer = StageTimer(self.device)
        validation: float | None = None
        self.observer.begin(self.step, steps)
        while self.step < steps and self.signal is None:
            record, experts = self._one_step(timer)
            validation = None
            evaluate = self.config.eval.every and self.step % self.config.eval.every == 0
            if evaluate or self.step == steps:
                validation = record["loss/validation"] = self._validate()
            metrics.step(record, experts)
            self.folder.progress(self.step)
            self.observer.step(record)
            if self.step % every == 0 or self.step == steps or self.signal is not None:
                self._save()
        return validation

    def _one_step(self, timer: StageTimer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trains one step and returns its metrics record and its expert loads."""
        started_s = time.perf_counter()
        with timer.stage("data"):
            batch = self.loader.batch(
                self.step, self.config.train.batch_size, self.layout.data_rank, self.layout.dp
            )
        self.step += 1
        tokens = self.step * self.config.tokens_per_step
        result = train_step(self.model, self.optimizer, batch, self.config, tokens, timer)
        scalars, experts = step_record(result, self.model)
        self._count_update(skipped=bool(scalars.pop("skipped")))
        stages = timer.milliseconds()
        step_s = time.perf_counter() - started_s
        rate = self.config.tokens_per_step / step_s
        record: dict[str, Any] = {
            "step": self.step,
            "time_unix_s": time.time(),
            "tokens": tokens,
            **scalars,
            "tokens_per_s": rate,
            "step_ms": step_s * 1e3,
            **stages,
            "active_ranks": self.layout.ranks,
        }
        if self.peak is not None:
            record["mfu"] = rate * self.flops / (self.peak * self.layout.ranks)
        if self.device.type == "cuda":
            record |= _memory_gib(self.device)
        if self.checkpoint_ms is not None:
            record["checkpoint/stall_ms"] = self.checkpoint_ms
            self.checkpoint_ms = None
        return record, {"step": self.step, **experts}

    def _count_update(self, *, skipped: bool) -> None:
        """Counts updates that were made; gives up after too many that were not."""
        if not skipped:
            self.updates += 1
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        self.folder.event("fault", step=self.step, what="gradient not finite, update skipped")
        if self.skipped_in_a_row >= MOST_SKIPPED_STEPS:
            raise TrainError(
                "E-NOT-FINITE",
                f"the gradient was not finite in {self.skipped_in_a_row} steps in a row up to "
                f"step {self.step}",
                "lower optimizer.lr or lengthen schedule.warmup, and start from an earlier "
                "checkpoint",
            )

    def _validate(self) -> float:
        return validation_loss(
            self.model,
            self.held_out,
            sequences=self.config.eval.sequences,
            batch_size=self.config.train.micro_batch_size or self.config.train.batch_size,
            chunk=self.config.train.loss_chunk,
        )

    def _save(self) -> None:
        started_s = time.perf_counter()
        meta = {
            "tokens": self.step * self.config.tokens_per_step,
            "updates": self.updates,
            "fingerprint": fingerprint(self.fields),
            "fields": self.fields,
            "layout": self.layout.sizes(),
            "loader": {"step": self.step, "seed": self.config.run.seed},
            "randomness": {"seed": self.config.run.seed},
        }
        write_checkpoint(
            self.folder.checkpoints,
            self.step,
            gather_state(self.model, self.optimizer),
            meta,
            keep=self.config.checkpoint.keep,
        )
        self.checkpoint_ms = (time.perf_counter() - started_s) * 1e3
        self.folder.event("checkpoint", step=self.step, commit_ms=self.checkpoint_ms)

    def _resume(self, allow_changes: bool) -> list[str]:
        """Takes the newest sound checkpoint, if any; returns what is wrong with newer ones."""
        checkpoint, problems = newest_sound_checkpoint(self.folder.checkpoints)
        for problem in problems:
            self.observer.message(f"warning {problem}")
        if checkpoint is None:
            return problems
        changed = _changed_fields(checkpoint.meta["fields"], self.fields)
        if changed and not allow_changes:
            raise TrainError(
                "E-RESUME-CONFIG",
                f"{checkpoint.path} was made with another configuration ({'; '.join(changed)})",
                "restore these values, choose another run.dir, or pass --allow-changes",
            )
        self.step = checkpoint.step
        self.updates = int(checkpoint.meta["updates"])
        restore_state(self.model, self.optimizer, checkpoint.tensors(), self.updates)
        self.observer.message(f"resuming from {checkpoint.path.name}")
        return problems

    def _description(self) -> dict[str, Any]:
        """What run.json says beside the run folder's own fields."""
        run = self.config.run
        return {
            "name": run.name or self.folder.record["run_id"],
            "tags": run.tags,
            "group": run.group,
            "steps": self.config.train.steps,
            "config": self.config.model_dump(mode="json"),
            "fingerprint": fingerprint(self.fields),
            "layout": self.layout.sizes(),
            "device": self._device_name(),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "data": {"dir": str(self.config.data_dir), "tokens": self.data.train.tokens},
        }

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu ({torch.get_num_threads()} threads)"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Notes SIGINT and SIGTERM while the steps run; the second one interrupts at once."""

        def note(number: int, _frame: object) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number)
            self.observer.message(f"{self.signal.name}: finishing this step, then saving")

        previous = {
            number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _changed_fields(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`model.width 256 -> 128` for every field that differs."""
    keys = sorted(before.keys() | now.keys())
    return [
        f"{key} {_short(before.get(key))} -> {_short(now.get(key))}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) > 40 else text


def _memory_gib(device: torch.device) -> dict[str, float]:
    """Memory of the CUDA allocator, in GiB."""
    return {
        "memory/allocated_gib": torch.cuda.memory_allocated(device) / 2**30,
        "memory/reserved_gib": torch.cuda.memory_reserved(device) / 2**30,
        "memory/peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
    }
