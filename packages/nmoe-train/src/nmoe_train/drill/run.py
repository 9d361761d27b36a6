"""A drill from its seed to its report: an undisturbed run, the same disturbed, both compared."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from nmoe_data.files import only_writer
from nmoe_data.prep import prep
from rich.console import Console
from rich.table import Table

from nmoe_train.config import Config, load_config
from nmoe_train.drill.inject import Injected, Injector
from nmoe_train.drill.orders import orders_of
from nmoe_train.drill.plan import Plan
from nmoe_train.drill.report import Report, make_report
from nmoe_train.elastic.launcher import Launcher
from nmoe_train.elastic.membership import largest_layout
from nmoe_train.errors import TrainError
from nmoe_train.presets import DRILL

WORK = "nmoe_train.drill.sabotage:sabotaged_work"
SENTENCE = "a token goes to some experts and the router says which of them and why"
DOCUMENTS = 400


@dataclass(frozen=True)
class Drill:
    """A drill of some workers in a folder; `tell` hears how far it is.

    `sets` are keys of the training to override.
    """

    folder: Path
    workers: int
    plan: Plan
    tell: Callable[[str], None]
    sets: tuple[str, ...] = ()

    def run(self) -> Report:
        """Trains twice, and compares. Raises TrainError when a run cannot begin or go on."""
        self._check()
        self._write_data()
        self._train("undisturbed", Plan((), self.plan.steps))
        injected = self._train("disturbed", self.plan)
        return make_report(injected, self.folder / "disturbed", self.folder / "undisturbed")

    def _write_data(self) -> None:
        """Short documents of a few words, the same on every machine."""
        draw, path = random.Random(0), self.folder / "text.jsonl"
        words = SENTENCE.split()
        lines = (" ".join(draw.choices(words, k=draw.randint(1, 40))) for _ in range(DOCUMENTS))
        content = (json.dumps({"text": f"{number} {line}"}) for number, line in enumerate(lines))
        path.write_text("\n".join(content) + "\n")
        prep(path, self.folder / "data", tokenizer="bytes", held_out=0.2)

    def _check(self) -> None:
        """Refuses a training that these workers cannot hold. Raises TrainError `E-DRILL`."""
        if largest_layout(self._config("undisturbed"), self.workers) is None:
            raise TrainError(
                "E-DRILL",
                f"{self.workers} workers cannot hold this layout",
                "give more --workers, or lower parallel.tp and parallel.pp",
            )

    def _config(self, name: str) -> Config:
        own = {
            "run.dir": str(self.folder / name),
            "data.dir": str(self.folder / "data"),
            "train.steps": self.plan.steps,
        }
        sets = [*self.sets, *(f"{key}={json.dumps(value)}" for key, value in own.items())]
        config = load_config(DRILL, sets)
        if any(key.startswith("parallel.ep=") for key in sets):
            return config
        ranks = self.workers // config.parallel.pp
        return load_config(DRILL, [*sets, f"parallel.ep={gcd(ranks, config.model.moe.experts)}"])

    def _train(self, name: str, plan: Plan) -> list[Injected]:
        """One run to its end; the faults that it had."""
        config = self._config(name)
        config.run.dir.mkdir()
        with (
            only_writer(config.run.dir),
            Launcher(config, self.workers, WORK, log=self.folder / f"{name}.log") as run,
        ):
            injector = Injector(
                plan, run, orders_of(config), self.workers, config.elastic.deadline_s, self.tell
            )
            seen = None
            while not run.ended:
                run.poll()
                injector.poll()
                assert run.coordinator is not None
                generation = run.coordinator.generation
                if generation is not seen and generation is not None:
                    seen = generation
                    sizes = " ".join(f"{name}={n}" for name, n in generation.sizes.items() if n > 1)
                    self.tell(
                        f"{name}: generation {generation.number}, "
                        f"{len(generation.members)} workers, {sizes}"
                    )
        if run.exit_code != 0:
            raise TrainError(
                "E-DRILL",
                f"the {name} run did not end by itself ({run.what or run.exit_code})",
                f"see what its workers said in {self.folder / f'{name}.log'}",
            )
        return injector.done


def show(report: Report, console: Console) -> None:
    """The report as a table."""
    table = Table(title="what happened, and when training went on")
    for heading in (
        "fault",
        "workers",
        "at step",
        "detected after",
        "recovered after",
        "steps lost",
        "layout",
        "state from",
    ):
        table.add_column(heading)
    for row in report.rows:
        after = f"{row.layout_before} -> {row.layout_after}" if row.layout_after else "the same"
        table.add_row(
            row.kind,
            row.workers,
            str(row.step),
            "overtaken" if row.overtaken else _seconds(row.detected_s),
            "overtaken" if row.overtaken else _seconds(row.recovered_s),
            "-" if row.steps_lost is None else str(row.steps_lost),
            after,
            row.state_from,
        )
    console.print(table)
    console.print(
        f"{report.steps} steps; final loss {report.final_loss:.7f}, undisturbed "
        f"{report.final_loss_undisturbed:.7f}; largest difference of the curve "
        f"{report.largest_difference:.1e}, of the validation loss "
        f"{report.validation_difference:.1e}",
        highlight=False,
    )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
