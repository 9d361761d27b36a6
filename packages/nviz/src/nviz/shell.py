"""What all pages share: the token gate, the workspace, the choice of a run, headers and empty
states.

The address carries the state: `?run=KEY` names the run, and each page's controls add theirs. Keys
are only looked up in the index. Text that comes from runs is escaped before it meets Markdown.
"""

import hmac
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.csv
import streamlit as st

from nviz.alerts import (
    DEFAULT_RULES,
    Alert,
    Rule,
    broken_rules,
    facts_of_files,
    facts_of_summary,
    read_rules,
)
from nviz.charts import Drawing, Panel
from nviz.errors import VizError
from nviz.formats import escaped, moment, shortened, status
from nviz.store import Run, Summary, Workspace
from nviz.store.remote import MirrorState, mirror_of, shown
from nviz.variables import RULES_VARIABLE, RUNS_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE

REFRESH_S = 2.0
# How often a page looks whether what it shows is still there.
GONE_S = 5.0
BADGE_COLOURS = {
    "running": "blue",
    "completed": "green",
    "stalled": "orange",
    "interrupted": "orange",
    "failed": "red",
    "unreadable": "red",
}
# Names in the session and, of the chosen runs, in the address.
PAGE, ENTERED, RUNS = "page_shown", "page_entered", "runs"
PAGES = Path(__file__).with_name("pages")
START_HINT = "nmoe-train quickstart"


def token_matches(given: str | None, expected: str) -> bool:
    """Whether the token is right, in a time that does not depend on how much of it is."""
    return hmac.compare_digest((given or "").encode(), expected.encode())


def gate() -> None:
    """Ends the page unless no token is set, or this session gave the right one once."""
    expected = os.environ.get(TOKEN_VARIABLE, "")
    if not expected or st.session_state.get("token_given"):
        return
    given = st.query_params.get("token")
    if not token_matches(given, expected):
        st.title("nviz")
        st.caption("This dashboard is shared by a token; its owner can tell you.")
        typed = st.text_input("Token", type="password")
        if not token_matches(typed, expected):
            if typed or given:
                st.error("That token is not the right one.")
            st.stop()
        st.session_state["token_given"] = True
        st.rerun()
    st.session_state["token_given"] = True


@st.cache_resource(show_spinner=False)
def _workspace(root: str) -> Workspace:
    return Workspace(Path(root))


def workspace() -> Workspace:
    """The process's workspace; ends the page if no token was given, or the runs' folder is gone."""
    gate()
    root = os.environ.get(RUNS_VARIABLE, "runs")
    try:
        return _workspace(root)
    except VizError as error:
        st.title("No runs folder")
        st.error(escaped(str(error)))
        st.stop()


def mirror_notice() -> None:
    """Says above every page how the mirror of a URL stands, unless it is all there and fresh."""
    url = os.environ.get(URL_VARIABLE, "")
    if url:
        mirror = mirror_of(url)
        st.fragment(lambda: _mirror_notice(mirror.url, mirror.state), run_every=REFRESH_S)()


def _mirror_notice(url: str, state: MirrorState) -> None:
    if state.problem is not None:
        then = moment(state.compared_unix_s)
        since = f"{then:%H:%M:%S} UTC" if then else "the start"
        st.error(
            f"Stale since {since}: shown is what was read until then. {escaped(state.problem)}",
            icon=":material/cloud_off:",
        )
    elif state.waiting > 0:
        st.info(f"Copying from {escaped(url)}: {state.waiting:,} file(s) to go.")
    if state.left_out:
        st.warning(
            f"{len(state.left_out):,} file(s) not copied. The first: {escaped(state.left_out[0])}"
        )


@st.cache_resource(show_spinner=False)
def _rules(path: str) -> tuple[Rule, ...]:
    return read_rules(Path(path)) if path else DEFAULT_RULES


def rules() -> tuple[Rule, ...]:
    """The alert rules that the server was started with."""
    return _rules(os.environ.get(RULES_VARIABLE, ""))


def alerts_of(runs: Sequence[Run], known: Mapping[str, Summary]) -> dict[str, list[str]]:
    """Names of the rules that runs break now, by key, from their summaries."""
    heat, now, asked = workspace().heat, time.time(), rules()
    found = {}
    for run in runs:
        if run.key in known:
            facts = facts_of_summary(run, known[run.key], heat)
            names = [alert.rule for alert in broken_rules(run, facts, asked, now)]
            if names:
                found[run.key] = names
    return found


def alert_lines(run: Run) -> None:
    """The rules that `run` breaks now, each with its reason."""
    space = workspace()
    facts = facts_of_files(run, space.columns, space.heat)
    found: list[Alert] = broken_rules(run, facts, rules(), time.time())
    for alert in found:
        st.warning(
            f"**{escaped(alert.rule)}**: {escaped(alert.what)}.",
            icon=":material/notifications_active:",
        )


SLASH_FOCUSES_SEARCH = """
export default function () {
  const focus = (event) => {
    const typing = /^(INPUT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const field = document.querySelector('input[aria-label^="Search"]');
    if (field) { event.preventDefault(); field.focus(); field.select(); }
  };
  document.addEventListener("keydown", focus);
  return () => document.removeEventListener("keydown", focus);
}
"""


def search_by_keyboard() -> None:
    """Lets the key `/` go to the page's search field."""
    st.components.v2.component("nviz_search_key", js=SLASH_FOCUSES_SEARCH)(key="search_key")


def header(title: str, line: str) -> None:
    """A page's title, and one line that says what it shows and what to look for."""
    # The address alone does not tell coming back to a page from clearing what it shows.
    st.session_state[ENTERED] = st.session_state.get(PAGE) != title
    st.session_state[PAGE] = title
    st.title(escaped(shortened(title, 100)), anchor=False)
    st.caption(line)


def section(title: str, line: str) -> None:
    """A section's title and its line."""
    st.markdown(f"##### {title}")
    st.caption(line)


def empty_root(root: Path) -> None:
    """The page of a folder without runs: what would be here, and how to make it."""
    if not root.is_dir():
        st.error(f"The folder {escaped(str(root))} is gone. Its runs appear once it is back.")
        return
    with st.container(border=True):
        st.subheader("No runs here yet", anchor=False)
        st.write("A run appears here as soon as a trainer writes its folder. Start a small one:")
        st.code(START_HINT, language="shell")
        place = shown(os.environ.get(URL_VARIABLE, "")) or str(root)
        st.caption(f"Looking in {escaped(place)} and three levels below, every few seconds.")


def choose_run(title: str | None, line: str) -> Run:
    """Header with the run's choice at its right; ends the page if there is no such run.

    The address decides first, then the session's last choice, then the newest run. Without a title
    the run's name is the title.
    """
    space = workspace()
    runs = space.runs()
    key = st.query_params.get("run") or st.session_state.get("last_run") or next(iter(runs), "")
    left, right = st.columns([3, 1.4], vertical_alignment="bottom")
    with left:
        header(title or (runs[key].name if key in runs else "Run"), line)
    if not runs:
        empty_root(space.root)
        st.stop()
    with right:
        _run_selector(runs, key)
    if key not in runs:
        _unknown_run(key)
    st.session_state["last_run"] = key
    if st.query_params.get("run") != key:
        st.query_params["run"] = key
    run = runs[key]
    notice_if(lambda: getattr(space.run(key), "identity", None) != run.identity)
    return run


def notice_if(is_gone: Callable[[], bool]) -> None:
    """Draws the whole page anew once what it shows was deleted or replaced, also when nothing else
    on it is refreshed.
    """

    def look() -> None:
        if is_gone():
            st.rerun()

    st.fragment(look, run_every=GONE_S)()


def _run_selector(runs: dict[str, Run], key: str) -> None:
    def take() -> None:
        st.query_params["run"] = st.session_state["run_choice"]

    st.session_state["run_choice"] = key if key in runs else None
    st.selectbox(
        "Run",
        list(runs),
        format_func=lambda item: _label(runs, item),
        key="run_choice",
        on_change=take,
        placeholder="Choose a run",
        label_visibility="collapsed",
    )


def _label(runs: dict[str, Run], key: str) -> str:
    run = runs.get(key)
    return f"{run.name} · {key}" if run and run.name != key.rsplit("/", 1)[-1] else key


def _unknown_run(key: str) -> None:
    st.warning(
        f"There is no run **{escaped(key[:200])}** here (any more). Its folder may have been "
        "moved or deleted. Choose another one above, or look at all runs."
    )
    if st.button("All runs"):
        st.switch_page(PAGES / "runs.py")
    st.stop()


def current(run: Run) -> Run:
    """The run as it is now; draws the page anew if its folder is gone, which then says so."""
    found = workspace().run(run.key)
    if found is None:
        st.rerun()
    return found


def choose_several(
    runs: Mapping[str, Run], first: Sequence[str], most: int, placeholder: str, help: str | None
) -> list[str]:
    """Keys of the runs that the reader chose, at most `most`; on coming back to the page those that
    were chosen last, before that `first`. They are put into the address, as runs that come later
    change the first choice.
    """
    last = f"runs of {st.session_state[PAGE]}"
    is_new = st.session_state[ENTERED] or RUNS not in st.session_state
    if is_new and RUNS not in st.query_params:
        keys = [key for key in st.session_state.get(last) or first if key in runs]
        if keys:
            st.session_state[RUNS] = st.query_params[RUNS] = keys
            # After the browser's Back the field takes its value from the address that came in.
            st.rerun()
    keys = st.multiselect(
        "Runs",
        list(runs),
        key=RUNS,
        bind="query-params",
        max_selections=most,
        placeholder=placeholder,
        help=help,
    )
    st.session_state[last] = keys
    return keys


def status_line(run: Run, facts: list[str]) -> None:
    """The run's status as a badge, and short facts behind it."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.badge(status(run.status), color=BADGE_COLOURS.get(run.status, "gray"))  # type: ignore[arg-type]  # a Literal of colours
        st.caption(" · ".join(escaped(shortened(fact, 160)) for fact in facts))
    if run.status == "unreadable":
        st.error(
            f"{escaped(run.problem or 'run.json cannot be read')}. What else is here is shown."
        )
    if run.status == "stalled":
        st.warning("It says it is running, but nothing was written for two minutes.")


def show_problems(problems: list[str]) -> None:
    """What could not be read, folded away: the charts show all the rest."""
    if not problems:
        return
    with st.expander(
        f"{len(problems)} file(s) could not be read in full", icon=":material/warning:"
    ):
        for problem in problems:
            st.text(problem)


def chart(figure: go.Figure, key: str, alt: str) -> None:
    """A figure whose menu saves it as a PNG, drawn in the browser, named by its key."""
    picture = {"format": "png", "scale": 2, "filename": key}
    config = {"displaylogo": False, "toImageButtonOptions": picture}
    st.plotly_chart(figure, key=key, config=config, alt=alt)


def _bad_line(drawing: Drawing) -> None:
    """How many values were not finite, and where the first ones were."""
    if not drawing.bad:
        return
    first = ", ".join(f"{label} {word} at step {step:,}" for label, word, step in drawing.bad[:3])
    more = f" and {len(drawing.bad) - 3} more" if len(drawing.bad) > 3 else ""
    count = len(drawing.bad)
    st.markdown(
        f":orange[{count} non-finite value{'s' if count > 1 else ''}]: {escaped(first)}{more}"
    )


def panel(shown: Panel, drawing: Drawing) -> None:
    """A panel with its title, its line, its figure, and what in it is not finite."""
    section(shown.title, shown.line)
    chart(drawing.figure, f"chart {shown.title}", shown.title)
    _bad_line(drawing)


def csv_button(name: str, table: Callable[[], pa.Table], label: str = "CSV") -> None:
    """A button that downloads a table as `<name>.csv`; it is made only when asked for."""

    def content() -> bytes:
        out = io.BytesIO()
        pyarrow.csv.write_csv(table(), out)
        return out.getvalue()

    st.download_button(
        label,
        content,
        file_name=f"{name}.csv",
        mime="text/csv",
        key=f"csv {name}",
        help="The values behind it. For a picture (PNG), point at the chart: the camera at its "
        "upper right saves one.",
        on_click="ignore",
        type="tertiary",
        icon=":material/download:",
    )


def is_dark() -> bool:
    """Whether the reader looks at the dark theme."""
    return bool(st.context.theme.type == "dark")


def live(draw: Callable[[Run], None], run: Run) -> None:
    """Draw now, and again every two seconds as long as the run may grow and the reader follows it.

    Streamlit draws a chart that changed anew, and a zoom into it is lost: so one can stop.
    """
    state = run.status
    following = run.is_live and st.toggle(
        "Follow the run",
        value=True,
        key="follow",
        bind="query-params",
        help="New steps are drawn every two seconds. Off, charts stay as they are, with their zoom",
    )

    def refresh() -> None:
        found = current(run)
        if found.status != state:
            st.rerun()
        draw(found)

    st.fragment(refresh, run_every=REFRESH_S if following else None)()
