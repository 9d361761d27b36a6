"""The Streamlit script: navigation, token gate, then the page that the address names."""

import logging

import streamlit as st

from nviz import shell
from nviz.formats import escaped

log = logging.getLogger("nviz")


def main() -> None:
    """One run of the script for one session."""
    st.set_page_config(page_title="nviz", page_icon="📈", layout="wide")
    shell.gate()
    pages = [
        st.Page(shell.PAGES / "runs.py", title="Runs", icon=":material/list:", default=True),
        st.Page(shell.PAGES / "run.py", title="Run", icon=":material/show_chart:"),
        st.Page(shell.PAGES / "compare.py", title="Compare", icon=":material/compare_arrows:"),
        st.Page(shell.PAGES / "router.py", title="Router", icon=":material/grid_on:"),
        st.Page(shell.PAGES / "performance.py", title="Performance", icon=":material/speed:"),
        st.Page(shell.PAGES / "gpus.py", title="GPUs", icon=":material/memory:"),
        st.Page(shell.PAGES / "faults.py", title="Faults", icon=":material/timeline:"),
        st.Page(shell.PAGES / "checkpoints.py", title="Checkpoints", icon=":material/save:"),
        st.Page(shell.PAGES / "experiments.py", title="Experiments", icon=":material/science:"),
        st.Page(shell.PAGES / "data.py", title="Data", icon=":material/dataset:"),
        st.Page(shell.PAGES / "hydra.py", title="HYDRA", icon=":material/filter_alt:"),
        st.Page(shell.PAGES / "configuration.py", title="Configuration", icon=":material/tune:"),
        st.Page(shell.PAGES / "sql.py", title="SQL", icon=":material/database:"),
    ]
    page = st.navigation(pages, position="top")
    shell.mirror_notice()
    try:
        page.run()
    except Exception as error:
        log.exception("the page %s failed", page.title)
        what = escaped(f"{type(error).__name__}: {error}"[:300])
        st.error(
            f"This page failed: {what}. The others work; the server's output says more.",
            icon=":material/error:",
        )


main()
