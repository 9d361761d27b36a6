"""Whether rules hold for a run, from what is known of it.

Both the list's summaries and `facts_of_files`, which counts, look at the newest `RECENT` steps, so
that a loss that was not finite for one of them is seen. Runs that were last heard of more than
`OLD_S` seconds ago break no rule: nobody can mend them any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nviz.alerts.rules import Rule
from nviz.store import ColumnReader, Run, Summary
from nviz.store.heat import Heat
from nviz.store.runs import last_metrics_write
from nviz.store.summary import RECENT

OLD_S = 86_400.0
LOSS, IMBALANCE = "loss/train", "router/load_imbalance"


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules ask of a run. `bad_losses` counts losses that were not finite, None where nobody
    counted, `bad_step` is the last of them; `hottest` is a rank and its degrees Celsius.
    """

    step: int | None
    bad_losses: int | None
    bad_step: int | None
    imbalance: float | None
    heard_unix_s: float
    hottest: tuple[int, float] | None


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that a run breaks, and in which way."""

    run: str
    rule: str
    what: str
    step: int | None


def facts_of_summary(run: Run, summary: Summary, heat: Heat) -> Facts:
    """What the list of runs knows."""
    return Facts(
        step=summary.step,
        bad_losses=None,
        bad_step=summary.bad_step,
        imbalance=summary.imbalance,
        heard_unix_s=_heard(run),
        hottest=heat.hottest(run.folder) if run.is_live else None,
    )


def facts_of_files(run: Run, columns: ColumnReader, heat: Heat) -> Facts:
    """What the newest steps in the run's files say."""
    rows = columns.rows(run.folder, [LOSS, IMBALANCE], newest=RECENT)
    newest = np.flatnonzero(~rows.superseded)
    if len(newest):
        newest = newest[rows.step[newest] > rows.step[newest[-1]] - RECENT]
    bad = np.zeros(0, dtype=np.int64)
    if LOSS in rows.columns:
        loss = rows.columns[LOSS]
        bad = newest[loss.present[newest] & ~np.isfinite(loss.values[newest])]
    imbalance = None
    if IMBALANCE in rows.columns and len(newest):
        known = newest[rows.columns[IMBALANCE].present[newest]]
        imbalance = float(rows.columns[IMBALANCE].values[known[-1]]) if len(known) else None
    return Facts(
        step=int(rows.step[newest[-1]]) if len(newest) else run.step,
        bad_losses=len(bad),
        bad_step=int(rows.step[bad[-1]]) if len(bad) else None,
        imbalance=imbalance,
        heard_unix_s=_heard(run),
        hottest=heat.hottest(run.folder) if run.is_live else None,
    )


def _heard(run: Run) -> float:
    """When the run's folder last got a record, or run.json its last word."""
    if not run.is_live:
        return run.ended_unix_s or run.updated_unix_s or 0.0
    return last_metrics_write(run.folder) or run.started_unix_s or 0.0


def broken_rules(run: Run, facts: Facts, rules: Sequence[Rule], now_unix_s: float) -> list[Alert]:
    """The rules that `run` breaks now."""
    if now_unix_s - facts.heard_unix_s > OLD_S:
        return []
    found = []
    for rule in rules:
        what = _broken(rule, run, facts, now_unix_s) if rule.concerns(run) else None
        if what is not None:
            found.append(Alert(run.key, rule.name, what, facts.step))
    return found


def _losses(count: int | None) -> str:
    return "losses" if count is None else f"{count:,} loss{'' if count == 1 else 'es'}"


def _broken(rule: Rule, run: Run, facts: Facts, now_unix_s: float) -> str | None:
    """In which way the rule is broken, or None."""
    if rule.kind == "loss_not_finite":
        if facts.bad_step is None:
            return None
        return f"{_losses(facts.bad_losses)} not finite lately, the last at step {facts.bad_step:,}"
    if rule.kind == "failed":
        return "the run failed" if run.status == "failed" else None
    if not run.is_live:
        return None
    if rule.kind == "no_step":
        silent_s = now_unix_s - facts.heard_unix_s
        return f"no step for {silent_s / 60:.0f} minutes" if silent_s > 60 * rule.limit else None
    if rule.kind == "imbalance":
        over = facts.imbalance is not None and facts.imbalance > rule.limit
        return f"load imbalance {facts.imbalance:.3g}, above {rule.limit:g}" if over else None
    if facts.hottest is None or facts.hottest[1] <= rule.limit:
        return None
    rank, degrees = facts.hottest
    return f"GPU of rank {rank} at {degrees:.0f} °C, above {rule.limit:g} °C"
