"""The training loop: resume, step, record, save, validate, leave when asked to.

Everything that a step depends on is a function of (seed, step) or stands in the checkpoint, so a
run that was stopped anywhere goes on bitwise as if it had not been. Every rank runs this loop and
takes the same decisions, as whatever they rest on is the same number on all; rank 0 alone keeps the
run's record.
"""

import contextlib
import dataclasses
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nmoe_data.files import only_writer, os_errors
from nmoe_data.loader import Loader
from nmoe_data.stats import unigram_loss
from nmoe_kernels import pick_backend
from nmoe_kernels.rdep import ExpertParallel

from nmoe_train.checkpoint import (
    complete_checkpoints,
    restore_state,
)
from nmoe_train.config import Config
from nmoe_train.config.fingerprint import fingerprint, result_fields
from nmoe_train.data import Step, TrainingData, to_step
from nmoe_train.device import pick_device
from nmoe_train.elastic.session import RESIZED, Session
from nmoe_train.elastic.snapshot import count_updates, held_pieces, wanted_pieces
from nmoe_train.errors import TrainError
from nmoe_train.eval import validation_loss
from nmoe_train.interrupt import SIGNALS, Interrupt
from nmoe_train.model import Transformer, initialise
from nmoe_train.model.costs import count_weights
from nmoe_train.model.tensor import TensorParallel
from nmoe_train.optim import build_optimizer
from nmoe_train.parallel.checksums import differing_ranks
from nmoe_train.parallel.experts import exchange_record
from nmoe_train.parallel.fsdp import shard_weights
from nmoe_train.parallel.groups import PEER_CODES, Groups, RankFailed, host_name
from nmoe_train.parallel.matrices import SharedMatrices
from nmoe_train.parallel.pipeline import Pipeline, held_layers, part_layers
from nmoe_train.saves import Saves
from nmoe_train.step import step_record, train_step
from nmoe_train.telemetry import (
    MetricsWriter,
    RunFolder,
    next_record,
    peak_flops,
    training_flops_per_token,
)
from nmoe_train.telemetry.stragglers import Stragglers
from nmoe_train.telemetry.timers import StageTimer

# Steps in a row without a finite gradient after which going on is pointless.
MOST_SKIPPED_STEPS = 10

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    """How a run ended: a status of run.json, the step it is at, and what is known of the model."""

    status: str
    step: int
    model: Transformer
    pipeline: Pipeline
    results: dict[str, float]
    """`loss/validation` and `loss/unigram`, in nats per token, once the run is complete."""
    stopped_by: signal.Signals | None = None


def train(
    config: Config,
    data: TrainingData,
    groups: Groups,
    observer: Observer,
    *,
    experts: ExpertParallel | None = None,
    allow_changes: bool = False,
    session: Session | None = None,
) -> Outcome:
    """Runs the configured training from its newest checkpoint, or from the start, to its end.

    `experts`: over which tokens travel to the experts of other ranks; None where each holds all.
    SIGINT and SIGTERM, to any rank, end the run after the step being made, with a checkpoint; a
    second one at once. `session`: this attempt's part in a run that goes on without lost workers;
    its outcome may be RESIZED, from where the next attempt goes on. Raises TrainError when no
    checkpoint is sound or the configuration is not the checkpoint's (unless `allow_changes`),
    DataError when the run folder is in use or cannot be written.
    """
    path = config.run.dir
    with (
        os_errors("use the run folder", path),
        contextlib.ExitStack() as held,
    ):
        interrupt = held.enter_context(Interrupt()) if session is None else session.interrupt
        # The launcher of an elastic run, which outlives the workers, has taken the folder.
        record = groups.first_does(
            lambda: _hold(path, held) if session is None else next_record(path)
        )
        folder = RunFolder(path, record, holds=groups.first, guard=groups.guard)
        training = _Training(config, data, groups, experts, observer, folder, interrupt, session)
        return training.run(allow_changes)


def _hold(path: Path, held: contextlib.ExitStack) -> dict[str, Any]:
    """Takes the run folder for this process alone; what it knows of earlier attempts."""
    path.mkdir(parents=True, exist_ok=True)
    held.enter_context(only_writer(path))
    return next_record(path)


class _Training:
    """A run in progress: the model, its optimizer, and where it is."""

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        groups: Groups,
        experts: ExpertParallel | None,
        observer: Observer,
        folder: RunFolder,
        interrupt: Interrupt,
        session: Session | None,
    ) -> None:
        self.config, self.data, self.groups, self.experts = config, data, groups, experts
        self.observer, self.folder, self.interrupt = observer, folder, interrupt
        self.session = session
        self.layout = groups.layout
        self.device = pick_device(
            config.run.device,
            deterministic=config.run.deterministic,
            local_rank=self.layout.local_rank,
            local_ranks=self.layout.local_ranks,
        )
        vocab_size = _vocab_size(config, data)
        stages = self.layout.pp
        parts = part_layers(config, vocab_size, stages)
        self.model = Transformer(
            config.model,
            vocab_size,
            dtype=DTYPES[config.precision.dtype],
            recompute=config.train.recompute == "layer",
            expert_parallel=experts,
            held=held_layers(parts, self.layout.pp_rank, stages),
            tensor=TensorParallel(
                groups.tensor, lambda: groups.waiting("among the ranks of a share")
            ),
            expert_tensor=TensorParallel(
                groups.expert_tensor, lambda: groups.waiting("among ranks that split experts")
            ),
        )
        initialise(self.model, config.model, config.run.seed)
        if config.parallel.fsdp:
            shard_weights(self.model, groups, self.device)
        self.model.to(self.device)
        self.pipeline = Pipeline(
            self.model,
            groups,
            parts,
            # One stage has nobody to wait for.
            schedule=config.parallel.pipeline.schedule if stages > 1 else "1f1b",
            deadline_s=config.parallel.rdep.deadline_s,
            attempt=folder.attempt + 1,
        )
        self.optimizer = build_optimizer(
            self.model,
            config.optimizer,
            SharedMatrices(self.model, groups) if config.optimizer.name == "muon" else None,
        )
        seq_len, seed = config.train.seq_len, config.run.seed
        self.loader = Loader(data.train, seq_len=seq_len, seed=seed)
        self.held_out = Loader(data.held_out, seq_len=seq_len, seed=seed)
        self.flops = training_flops_per_token(config.model, vocab_size, seq_len)
        self.peak = peak_flops(self.device, config.telemetry.peak_tflops)
        self.fields = result_fields(config, data.fingerprint, self.layout.sizes())
        self.stopped_by: signal.Signals | None = None
        self.resized = False
        self.came_from = "disk"
        self.recovery: dict[str, Any] | None = None
        self.stragglers = Stragglers(
            config.telemetry.straggler_factor, config.telemetry.straggler_steps
        )
        self.own_ms = 0.0
        self.step = 0
        self.updates = 0
        self.skipped_in_a_row = 0
        self.results: dict[str, float] = {}
        self.save_failed = False
        self.saves = Saves(
            config,
            groups,
            folder,
            self.device,
            self.fields,
            observer.message,
            may_fail=session is not None,
        )

    def run(self, allow_changes: bool) -> Outcome:
        problems = self._resume(allow_changes)
        self.saves.start_mirror()
        if self.step >= self.config.train.steps and self.folder.completed:
            steps = self.config.train.steps
            self.observer.message(f"the run is complete: step {self.step} of {steps} asked for")
            self.results = self.folder.record["results"]
            self.saves.finish_mirror(self.step, self.interrupt)
            return self._outcome("completed")
        if self.session is not None and self.session.generation.faults:
            step = self.session.generation.step_before
            self.folder.event("end", step=step, status="lost a rank")
        self.folder.begin(self.step, **self._description())
        for problem in problems:
            self.folder.event("fault", step=self.step, what=problem)
        if self.session is not None:
            self._begin_session(self.session)
        try:
            status = self._attempt()
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            if self.session is not None and self.session.recoverable(error):
                # What happened is told by those that go on, from a state that they choose.
                self.saves.abandon()
                raise
            # With a rank gone a save comes to nothing, and its launcher soon ends this one too.
            told = isinstance(error, RankFailed)
            gone = getattr(error, "code", None) in PEER_CODES and not told
            self.saves.leave(self.step, wait=status == "failed" and not gone)
            # A full disk may refuse these too, or a run that goes on elsewhere; the error itself
            # is what the user must see.
            with contextlib.suppress(OSError, TrainError):
                self.folder.event("fault", step=self.step, what=str(error) or type(error).__name__)
                self.folder.end(status, **self.results)
            raise
        self.saves.close()
        if status == RESIZED:
            self.saves.end_mirror(self.step)
            self.folder.event("end", step=self.step, status=status)
            return self._outcome(status)
        try:
            self.saves.finish_mirror(self.step, self.interrupt)
        finally:
            self.folder.end(status, **self.results)
        return self._outcome(status)

    def _begin_session(self, session: Session) -> None:
        """Notes what led to this generation, and copies the state it begins with."""
        for event in session.opening_events(self.step):
            self.folder.event(event.pop("event"), **event)
        self.recovery = session.recovery(self.step, self.came_from)
        pieces = held_pieces(self.model, self.optimizer)
        session.memory.open(pieces, self.groups, session.generation.number)
        if self.step > 0:
            session.memory.take(pieces, self.step, self._facts())

    def _facts(self) -> dict[str, Any]:
        """What a copy in memory must know beside its tensors."""
        return {
            "updates": self.updates,
            "skipped_in_a_row": self.skipped_in_a_row,
            "results": self.results,
        }

    def _tell_of_recovery(self, session: Session) -> None:
        """Notes, once training goes on, how long that took."""
        if self.recovery is not None:
            seconds = session.seconds_since_fault()
            self.folder.event("recovery", **self.recovery, seconds=seconds)
            self.recovery = None

    def _make_way(self, session: Session) -> None:
        """Keeps the state as it is for the next generation."""
        if not session.memory.every:
            self._save()
        elif not session.memory.has(self.step):
            pieces = held_pieces(self.model, self.optimizer)
            session.memory.take(pieces, self.step, self._facts())
        session.memory.settle(self.step)
        self.saves.finish(self.step, needed=not session.memory.every)

    def _finish_step(self, session: Session) -> None:
        """Says that a step is done, and copies the state if it is time or the last chance."""
        session.heart.finished(self.step)
        self._tell_of_recovery(session)
        memory = session.memory
        memory.settle(self.step)
        if memory.every and self.step % memory.every == 0:
            memory.take(held_pieces(self.model, self.optimizer), self.step, self._facts())

    def _attempt(self) -> str:
        """Steps until the end or a signal, saved and validated; the status that this gives."""
        metrics = MetricsWriter(
            self.folder.metrics,
            self.folder.attempt,
            self.layout.rank,
            self.config.telemetry.seal_every,
        )
        with self.interrupt.noted(self.observer.message):
            self._steps(metrics)
            metrics.close()
            if self.session is not None:
                self._tell_of_recovery(self.session)
                if self.resized:
                    self._make_way(self.session)
                    return RESIZED
            if self.step != self.saves.step:
                self._save()
            self.saves.finish(self.step, needed=True)
        if self.step < self.config.train.steps:
            return "interrupted"
        if "loss/validation" not in self.results:
            self._validate()
        self.results["loss/unigram"] = self.groups.first_does(
            lambda: unigram_loss(self.data.train, self.data.held_out)
        )
        return "completed"

    def _steps(self, metrics: MetricsWriter) -> None:
        steps, every = self.config.train.steps, self.config.checkpoint.every
        timer = StageTimer(self.device)
        self.observer.begin(self.step, steps)
        while self.step < steps and (made := self._one_step(timer)) is not None:
            record, experts = made
            evaluate = self.config.eval.every and self.step % self.config.eval.every == 0
            if evaluate or self.step == steps:
                record["loss/validation"] = self._validate()
            # One that was stopped here, and replaced, has nothing to add to the record.
            self.groups.guard()
            metrics.step(record, experts)
            self.folder.progress(self.step)
            self.observer.step(record)
            self._give_up_if_hopeless()
            if self.session is not None:
                self._finish_step(self.session)
            if self.step % every == 0 or self.step == steps:
                self._save()

    def _one_step(self, timer: StageTimer) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Trains one step; its metrics record and expert loads, or None where the run must stop."""
        started_s, waited_s = time.perf_counter(), self.groups.waited_s
        with timer.stage("data"):
            batch = self.loader.batch(
                self.step, self.config.train.batch_size, self.layout.data_rank, self.layout.dp
            )
            share = to_step(batch)
        share = self._agree(share)
        if self.stopped_by is not None or self.resized:
            return None
        if self.save_failed:
            self.saves.finish(self.step, needed=False)
        self.saves.poll(self.step)
        self.step += 1
        tokens = self.step * self.config.tokens_per_step
        moved = None if self.experts is None else self.experts.counters()
        every = self.config.telemetry.gradient_checksum_every
        result = train_step(
            self.model,
            self.optimizer,
            share,
            self.config,
            tokens,
            timer,
            self.groups,
            self.pipeline,
            self._compare_gradients if every and self.step % every == 0 else None,
        )
        scalars, experts = step_record(result)
        self._count_update(skipped=bool(scalars.pop("skipped")))
        stages = timer.milliseconds()
        step_s = time.perf_counter() - started_s
        record: dict[str, Any] = {
            "step": self.step,
            "time_unix_s": time.time(),
            "tokens": tokens,
            **scalars,
            "tokens_per_s": self.config.tokens_per_step / step_s,
            "step_ms": step_s * 1e3,
            **stages,
            **self.saves.times(),
            "active_ranks": self.layout.ranks,
        }
        if self.peak is not None:
            rate = record["tokens_per_s"] * self.flops
            record["mfu"] = rate / (self.peak * self.layout.ranks)
        if self.experts is not None and moved is not None:
            self.experts.check()
            record |= exchange_record(self.experts.counters().since(moved), self.groups)
        if self.device.type == "cuda":
            record |= _memory_gib(self.device)
        waited_ms = (self.groups.waited_s - waited_s) * 1e3 + record.get("rdep/wait_ms", 0.0)
        record["own_ms"] = self.own_ms = max(0.0, record["step_ms"] - waited_ms)
        return record, {"step": self.step, **experts}

    def _compare_gradients(self) -> None:
        """Names ranks whose gradients are not those of the others that must have the same."""
        for rank in differing_ranks(self.model, self.groups):
            what = f"the gradients of rank {rank} are not those of its replicas"
            self.folder.event("alert", step=self.step, what=what, rank=rank)

    def _agree(self, share: Step) -> Step:
        """Counts the targets of all ranks.

        With them travels whether one was asked to stop or to make room for a worker, whether what
        it saves has failed, and how long each was at work in the step before.
        """
        asked = [int(self.interrupt.signal == number) for number in SIGNALS]
        resize = int(self.session is not None and self.session.heart.resizing())
        counted = share.predictions if self.layout.speaks_for_share else 0
        own_us = [0] * self.layout.ranks
        own_us[self.layout.rank] = round(self.own_ms * 1e3)
        failed = int(self.saves.failed)
        predictions, resize, failed, *votes = self.groups.counts(
            counted, resize, failed, *asked, *own_us
        )
        asked, own_us = votes[: len(SIGNALS)], votes[len(SIGNALS) :]
        self.stopped_by = next((n for n, vote in zip(SIGNALS, asked, strict=True) if vote), None)
        self.resized = resize > 0 and self.stopped_by is None
        self.save_failed = failed > 0
        for rank, factor in self.stragglers.observe([us / 1e3 for us in own_us]):
            what = f"rank {rank} takes {factor:.1f} times as long as the others"
            self.folder.event("alert", step=self.step, what=what, rank=rank, factor=factor)
        return dataclasses.replace(share, predictions=predictions)

    def _count_update(self, *, skipped: bool) -> None:
        """Counts updates that were made, and those in a row that were not."""
        if skipped:
            self.skipped_in_a_row += 1
            what = "gradient not finite, update skipped"
            self.folder.event("fault", step=self.step, what=what)
        else:
            self.updates += 1
            self.skipped_in_a_row = 0

    def _give_up_if_hopeless(self) -> None:
        if self.skipped_in_a_row < MOST_SKIPPED_STEPS:
            return
        raise TrainError(
            "E-NOT-FINITE",
            f"the gradient was not finite in {self.skipped_in_a_row} steps in a row up to step "
            f"{self.step}",
            "lower optimizer.lr or lengthen schedule.warmup, and start from an earlier checkpoint",
        )

    def _validate(self) -> float:
        """Held-out loss of the model as it is; noted as the run's result and as an event."""
        loss = validation_loss(
            self.model,
            self.held_out,
            sequences=self.config.eval.sequences,
            batch_size=self.config.train.micro_batch_size
            or self.config.train.batch_size // self.layout.dp,
            chunk=self.config.train.loss_chunk,
            groups=self.groups,
            pipeline=self.pipeline,
        )
        if self.experts is not None:
            # Before the number is believed: tokens may have missed their experts.
            self.experts.check()
        self.results["loss/validation"] = loss
        self.folder.event("eval", step=self.step, **{"loss/validation": loss})
        return loss

    def _save(self) -> None:
        self.saves.begin(self.step, self.updates, self.model, self.optimizer)

    def _remember(self, session: Session) -> bool:
        """Takes the state that the ranks hold together in memory, if it is the newest there is."""
        saved_step = self.groups.first_does(lambda: _newest_step(self.folder.checkpoints))
        pieces = wanted_pieces(self.model, self.optimizer)
        facts = session.memory.restore(pieces, self.groups, newer_than=saved_step)
        if facts is None:
            return False
        self.step, self.updates, self.saves.step = facts["step"], facts["updates"], saved_step
        self.skipped_in_a_row, self.results = facts["skipped_in_a_row"], facts["results"]
        count_updates(self.optimizer, self.updates)
        self.came_from = "memory"
        return True

    def _resume(self, allow_changes: bool) -> list[str]:
        """Takes the newest sound checkpoint, if any; returns what should be noted as faults."""
        if self.session is not None and self._remember(self.session):
            self.observer.message(f"going on from step {self.step}, from memory")
            return []
        checkpoint, problems = self.saves.newest()
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
        self.step = self.saves.step = checkpoint.step
        self.updates = int(checkpoint.meta["updates"])
        saved = checkpoint.tensors()
        self.groups.all_do(lambda: restore_state(self.model, self.optimizer, saved, self.updates))
        self.observer.message(f"resuming from {checkpoint.path.name}")
        before, now = checkpoint.meta["steps"], self.config.train.steps
        if before != now:
            self.observer.message(
                f"warning train.steps {before} -> {now}: where schedule.warmup and schedule.decay "
                "are shares of the run, the learning rate is now another one"
            )
        return problems

    def _description(self) -> dict[str, Any]:
        """What run.json says beside the run folder's own fields."""
        run = self.config.run
        dtype = DTYPES[self.config.precision.dtype]
        hosts = self.groups.all_do(host_name)
        return {
            "name": run.name or self.folder.record["run_id"],
            "tags": run.tags,
            "group": run.group,
            "steps": self.config.train.steps,
            "config": self.config.model_dump(mode="json"),
            "fingerprint": fingerprint(self.fields),
            "layout": self.layout.sizes(),
            "device": self._device_name(),
            "backend": pick_backend(None, self.device.type, dtype),
            "parameters": count_weights(self.config.model, self.model.vocab_size),
            "data": {"dir": str(self.config.data_dir), "tokens": self.data.train.tokens},
            "hosts": list(dict.fromkeys(hosts)),
            "transport": None if self.experts is None else self.experts.transport,
        }

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu ({torch.get_num_threads()} threads)"

    def _outcome(self, status: str) -> Outcome:
        return Outcome(status, self.step, self.model, self.pipeline, self.results, self.stopped_by)


def _vocab_size(config: Config, data: TrainingData) -> int:
    """Rows of the embedding. Raises TrainError if the tokenizer has more ids."""
    needed = data.tokenizer.vocab_size
    asked = config.model.vocab_size or needed
    if asked < needed:
        raise TrainError(
            "E-CONFIG",
            f"model.vocab_size: {asked} rows for a tokenizer of {needed} ids",
            "raise it, or leave it out to follow the tokenizer",
        )
    return asked


def _newest_step(root: Path) -> int:
    """Step of the newest complete checkpoint; 0 if there is none."""
    folders = complete_checkpoints(root)
    return int(folders[0].name.removeprefix("step-")) if folders else 0


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
