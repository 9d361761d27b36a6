"""One run as one HTML file: curves, router, events and settings, to keep or to send.

The file holds all that it needs, the chart library once, and forbids itself by a content policy to
ask anything of anyone. Text that comes from a run is escaped wherever it meets HTML or a script.
"""

import html
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from nviz import __version__, formats
from nviz.charts import (
    View,
    add_baseline,
    panel_figure,
)
from nviz.errors import VizError
from nviz.panels import LOSS, ROUTER_PANELS, RUN_PANELS
from nviz.queries import curves, experts
from nviz.queries.configuration import flatten
from nviz.router_figures import imbalance_map_figure, layer_loads_figure, load_map_figure
from nviz.store import Event, Run, Workspace
from nviz.store.plain import is_plain

MOST_EVENTS = 500
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color:#222;
background:#fff}h1{margin:0}h2{margin:2rem 0 0;font-size:1.1rem}p{margin:.2rem 0;color:#555}
table{border-collapse:collapse;width:100%;font-size:13px}td,th{text-align:left;padding:.2rem .5rem;
border-bottom:1px solid #ddd;vertical-align:top;overflow-wrap:anywhere}
.bad{color:#a33c00}details{margin-top:2rem}summary{cursor:pointer;font-weight:600}
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A chart with its title, the line that says what to look for, and what is not finite in it."""

    title: str
    line: str
    figure: go.Figure
    bad: int = 0


def write_html(folder: Path, out: Path) -> int:
    """Writes the run in `folder` to the file `out`, whole or not at all; returns its size in bytes.

    Raises VizError `E-RUN-MISSING` if `folder` holds no readable run, or `E-EXPORT-OUT` if `out`
    cannot be written.
    """
    run, space = _open(folder)
    content = _page(run, space).encode()
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(out)
    except OSError as error:
        raise VizError(
            "E-EXPORT-OUT", f"{out} cannot be written ({error.strerror})", "name another file"
        ) from error
    return len(content)


def _open(folder: Path) -> tuple[Run, Workspace]:
    if not is_plain(folder / "run.json"):
        raise VizError("E-RUN-MISSING", f"{folder} holds no run.json", "give the folder of one run")
    space = Workspace(folder)
    run = next(iter(space.runs().values()), None)
    if run is None:
        # It was there a moment ago.
        raise VizError("E-RUN-MISSING", f"{folder} holds no run.json any more", "try again")
    if run.status == "unreadable":
        raise VizError("E-RUN-MISSING", f"{folder}: {run.problem}", "mend run.json")
    return run, space


def _page(run: Run, space: Workspace) -> str:
    events = space.events(run)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{html.escape(run.name)}</title><style>{STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body>",
        _head(run),
    ]
    sections = [*_curves(run, space, events), *_router(run, space)]
    parts += [_chart(at, section) for at, section in enumerate(sections)]
    if not sections:
        parts.append("<p>This run recorded no step.</p>")
    parts += [_events(events), _settings(run), "</body></html>"]
    return "\n".join(parts)


def _head(run: Run) -> str:
    steps = f"{formats.count(run.step)} of {formats.count(run.steps)} steps"
    taken = formats.moment(time.time())
    facts = [
        formats.status(run.status),
        steps,
        f"attempt {run.attempt}",
        run.device or "",
        *run.tags,
    ]
    words = " · ".join(html.escape(fact) for fact in facts if fact)
    when = f"{taken:%Y-%m-%d %H:%M} UTC" if taken else ""
    return f"<h1>{html.escape(run.name)}</h1><p>{words}</p><p>nviz {__version__}, {when}</p>"


def _curves(run: Run, space: Workspace, events: Sequence[Event]) -> Iterator[Section]:
    panels = (LOSS, *RUN_PANELS, *ROUTER_PANELS)
    names = sorted({name for panel in panels for name in panel.metrics.values()})
    table = curves.table_of(space.columns.rows(run.folder, names))
    table = curves.with_evaluations(table, curves.evaluations(events), "step")
    for panel in panels:
        drawing = panel_figure(table, panel, View(earlier=run.attempt > 1))
        if drawing is None:
            continue
        unigram = run.results.get("loss/unigram")
        if panel is LOSS and unigram is not None:
            add_baseline(drawing.figure, unigram, "unigram baseline")
        yield Section(panel.title, panel.line, drawing.figure, len(drawing.bad))


def _router(run: Run, space: Workspace) -> Iterator[Section]:
    with space.experts(run) as loads:
        blocks = loads.blocks()
    at = experts.loads_at(blocks)
    if at is None:
        return
    line = "1× is an even share. Dark: idle; bright: crowded."
    yield Section(f"Layers by experts, step {at.step:,}", line, layer_loads_figure(at))
    yield Section(
        "Imbalance by layer over steps",
        "Busiest expert over the mean.",
        imbalance_map_figure(experts.imbalance_map(blocks)),
    )
    for layer in _worst_layers(at):
        figure = load_map_figure(experts.load_map(blocks, layer))
        yield Section(f"Layer {layer}: experts over steps", line, figure)


def _worst_layers(at: experts.LayerLoads, count: int = 3) -> list[int]:
    """The layers whose busiest expert is furthest above the mean at the newest step."""
    heights = [(max(load_E), layer) for load_E, layer in zip(at.load_LE, at.layers, strict=True)]
    finite = [(height, layer) for height, layer in heights if height == height]
    return [layer for _, layer in sorted(finite, reverse=True)[:count]]


def _chart(at: int, section: Section) -> str:
    # A script ends at the first "</script", wherever it stands.
    spec = section.figure.to_json().replace("<", "\\u003c")
    bad = f"<p class='bad'>{section.bad} non-finite values, marked by crosses</p>"
    return (
        f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.line)}</p>"
        f"{bad if section.bad else ''}<div id='chart{at}'></div>"
        f"<script>{{const f={spec};Plotly.newPlot('chart{at}',f.data,f.layout,"
        "{displaylogo:false,responsive:true});}</script>"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _events(events: Sequence[Event]) -> str:
    rows = [
        (_when(item), item.event, formats.count(item.step), item.detail_text)
        for item in events[: -MOST_EVENTS - 1 : -1]
    ]
    more = f", the newest {MOST_EVENTS}" if len(events) > MOST_EVENTS else ""
    table = _table(("time (UTC)", "event", "step", "detail"), rows)
    return f"<details><summary>{len(events)} events{more}</summary>{table}</details>"


def _when(item: Event) -> str:
    found = formats.moment(item.time_unix_s)
    return f"{found:%Y-%m-%d %H:%M:%S}" if found else "–"


def _settings(run: Run) -> str:
    facts = {
        "fingerprint": run.fingerprint,
        "git revision": run.git_revision,
        "hosts": ", ".join(run.hosts),
        "versions": json.dumps(run.versions),
    }
    rows = [(name, value or "–") for name, value in facts.items()] + flatten(run.config)
    return f"<details><summary>Settings</summary>{_table(('setting', 'value'), rows)}</details>"
