"""Read-only SQL over all runs."""

import time

import streamlit as st

from nviz import formats, shell
from nviz.errors import VizError
from nviz.store.database import LIMIT_S

MOST_ROWS = 10_000
MOST_BYTES = 32 * 2**20
# Of `runs` alone, as it is answered as soon as the page is opened.
EXAMPLE = """SELECT run, name, status, step, steps, results->>'loss/validation' AS validation
FROM runs
ORDER BY started_unix_s DESC"""
METRICS_EXAMPLE = """SELECT run, max(step) AS steps, min("loss/train") AS best_loss
FROM metrics
WHERE NOT superseded AND isfinite("loss/train")
GROUP BY run
ORDER BY best_loss"""


def answer(sql: str) -> None:
    """Run the query and show its rows, or why it was refused."""
    started = time.perf_counter()
    try:
        with st.spinner("Reading the runs and answering"):
            reply = shell.workspace().sql.query(sql, MOST_ROWS, LIMIT_S, MOST_BYTES)
    except VizError as error:
        st.error("The query was refused.")
        st.code(str(error), language=None)
        return
    found = reply.answer
    frame = formats.table(found.columns, found.rows)
    more = f", the first {MOST_ROWS:,} shown" if found.truncated else ""
    age = formats.duration(time.time() - reply.taken_unix_s)
    seconds = time.perf_counter() - started
    st.caption(f"{len(found.rows):,} rows{more}, {seconds:.2f} s; files as of {age} ago.")
    height = min(380, 38 + 35 * max(1, frame.num_rows))
    st.dataframe(frame, hide_index=True, height=height, key="answer")
    shell.show_problems(list(reply.problems))


def page() -> None:
    """A query, its button and its rows."""
    shell.header(
        "SQL",
        "What the views `runs`, `metrics` and `events` answer to DuckDB's SQL, reading only. Look "
        'for what no page shows; names with a slash need double quotes: `"loss/train"`.',
    )
    sql = st.text_area(
        "Query", EXAMPLE, height=150, key="sql", bind="query-params", label_visibility="collapsed"
    )
    with st.container(horizontal=True, gap="small"):
        st.button("Run query", type="primary", icon=":material/play_arrow:")
        with st.popover("An example with metrics"):
            st.code(METRICS_EXAMPLE, language="sql")
    if sql and sql.strip():
        answer(sql)


page()
