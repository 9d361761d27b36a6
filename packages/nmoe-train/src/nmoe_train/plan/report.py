"""A dry run as text: a table of memory, one of what is sent, and a line of judgement."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Table

from nmoe_train.plan.dry_run import DryRun


def summary(report: DryRun) -> str:
    """What the layout is, how long stages wait, and how evenly memory is spread."""
    layout, stages = report.layout, report.stages
    sizes = " ".join(f"{name}={size}" for name, size in layout.sizes().items() if size > 1)
    fullest = max(stages, key=lambda stage: stage.total)
    sharded = ", weights sharded over replicas" if report.sharded else ""
    return (
        f"{layout.ranks:,} ranks{': ' + sizes if sizes else ''}{sharded}; {report.micro_batches} "
        f"micro-batches a step, schedule {report.schedule}, carried out without deadlock, bubble "
        f"{report.bubble:.1%}; fullest ranks {spans(fullest.ranks)}, {_size(fullest.total)}, "
        f"{report.balance:.2f} times the mean"
    )


def lines(report: DryRun) -> Iterable[str]:
    """What each rank of a stage holds and sends, a line a stage."""
    for stage in report.stages:
        held = f"layers {spans(stage.layers)}, {stage.experts} experts a layer"
        sent = ", ".join(f"{kind} {_size(bytes)}" for kind, bytes in stage.sent.items())
        yield (
            f"ranks {spans(stage.ranks)}: {held}, {stage.weights.all:,} weights, about "
            f"{_size(stage.total)}; sends in a step: {sent or 'nothing'}"
        )


def tables(report: DryRun) -> Iterable[Table]:
    """Memory of a rank and what it sends in a step, by stage."""
    stages = report.stages
    kinds = [kind for kind in stages[0].memory if any(stage.memory[kind] for stage in stages)]
    unit, scale = _unit(max(stage.total for stage in stages))
    columns = (
        "layers",
        "experts",
        "weights held",
        "in flight",
        *kinds,
        "in a pass",
        "in the update",
    )
    memory = _table(f"A rank's memory, {unit}: the larger of the last two columns", *columns)
    for stage in stages:
        held = (str(stage.experts), f"{stage.weights.all:,}", str(stage.in_flight))
        numbers = [stage.memory[kind] for kind in kinds]
        numbers += [sum(stage.memory.values()), stage.update]
        memory.add_row(
            *(str(stage.stage), spans(stage.ranks), spans(stage.layers), *held),
            *(f"{number / scale:,.2f}" for number in numbers),
        )
    yield memory
    sent = sorted({kind for stage in stages for kind in stage.sent})
    if sent:
        unit, scale = _unit(max(sum(stage.sent.values()) for stage in stages))
        traffic = _table(f"A rank sends in a step, {unit}", *sent, "total")
        for stage in stages:
            numbers = [stage.sent.get(kind, 0.0) for kind in sent]
            cells = (f"{number / scale:,.2f}" for number in (*numbers, sum(numbers)))
            traffic.add_row(str(stage.stage), spans(stage.ranks), *cells)
        yield traffic


def spans(numbers: Sequence[int]) -> str:
    """Runs of consecutive numbers, as "0-3, 8"."""
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(runs)


def _size(bytes: float) -> str:
    unit, scale = _unit(bytes)
    return f"{bytes / scale:,.1f} {unit}"


def _unit(bytes: float) -> tuple[str, int]:
    """The largest unit of which there is one, and its bytes."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    return next(((unit, scale) for unit, scale in units.items() if bytes >= scale), ("B", 1))


def _table(title: str, *columns: str) -> Table:
    table = Table("stage", "ranks", title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "layers" else "right")
    return table
