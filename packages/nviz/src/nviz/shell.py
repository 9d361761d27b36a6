"""What all pages share: the token gate, the workspace, the choice of a run, headers and empty
states.

The address carries the state: `?run=KEY` names the run, and each page's controls add theirs. Keys
are only looked up in the index. Text that comes from runs is escaped before it meets Markdown.
"""

import hmac
import os
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from nviz.errors import VizError
from nviz.formats import escaped, status
from nviz.store import Run, Workspace
from nviz.variables import RUNS_VARIABLE, TOKEN_VARIABLE

REFRESH_S = 2.0
BADGE_COLOURS = {
    "running": "blue",
    "completed": "green",
    "stalled": "orange",
    "interrupted": "orange",
    "failed": "red",
    "unreadable": "red",
}
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


def header(title: str, line: str) -> None:
    """A page's title, and one line that says what it shows and what to look for."""
    st.title(escaped(title), anchor=False)
    st.caption(line)


def section(title: str, line: str) -> None:
    """A section's title and its line."""
    st.markdown(f"##### {title}")
    st.caption(line)


def empty_root(root: Path) -> None:
    """The page of a folder without runs: what would be here, and how to make it."""
    with st.container(border=True):
        st.subheader("No runs here yet", anchor=False)
        st.write("A run appears here as soon as a trainer writes its folder. Start a small one:")
        st.code(START_HINT, language="shell")
        st.caption(f"Looking in {escaped(str(root))} and three levels below, every few seconds.")


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
    return runs[key]


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
    """The run as it is now; ends the page or the fragment if its folder is gone."""
    found = workspace().run(run.key)
    if found is None:
        st.warning("This run's folder is gone: it was moved or deleted while you looked at it.")
        st.stop()
    return found


def status_line(run: Run, facts: list[str]) -> None:
    """The run's status as a badge, and short facts behind it."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.badge(status(run.status), color=BADGE_COLOURS.get(run.status, "gray"))  # type: ignore[arg-type]  # a Literal of colours
        st.caption(" · ".join(escaped(fact) for fact in facts))
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


def is_dark() -> bool:
    """Whether the reader looks at the dark theme."""
    return bool(st.context.theme.type == "dark")


def live(draw: Callable[[Run], None], run: Run) -> None:
    """Draw now, and again every two seconds as long as the run may grow."""
    state = run.status

    def refresh() -> None:
        found = current(run)
        if found.status != state:
            st.rerun()
        draw(found)

    st.fragment(refresh, run_every=REFRESH_S if run.is_live else None)()
