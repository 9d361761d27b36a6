"""Pages of nviz run headless, and what they show in words."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nviz
import pytest
from streamlit.testing.v1 import AppTest

PAGES = Path(nviz.__file__).parent / "pages"
# A name that would be markup wherever it is not escaped.
EVIL = "<script>alert(1)</script> [x](javascript:alert(1)) **b** :red[r] $x$"
Open = Callable[..., AppTest]


@pytest.fixture
def open_page(root: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a page over `root` with an address' parameters; what it raises fails the test."""
    monkeypatch.setenv("NVIZ_RUNS", str(root))
    monkeypatch.setenv("NVIZ_TOKEN", "")

    def opened(page: str, **parameters: str | list[str]) -> AppTest:
        app = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=60)
        for name, value in parameters.items():
            app.query_params[name] = value
        return rerun(app)

    return opened


def rerun(app: AppTest) -> AppTest:
    """Run the page again; what it raises fails the test."""
    app.run()
    assert not app.exception, [item.message for item in app.exception]
    return app


def texts(app: AppTest) -> str:
    """All prose of a page, with the escapes taken out."""
    kinds = (app.title, app.subheader, app.caption, app.markdown, app.info, app.warning)
    more = (app.error, app.success, app.text)
    found = "\n".join(str(item.value) for kind in (*kinds, *more) for item in kind)
    return re.sub(r"\\(.)", r"\1", found)


def markup(app: AppTest) -> str:
    """All prose of a page without its escaped letters: what is left could act as markup."""
    kinds = (app.title, app.subheader, app.caption, app.markdown, app.info, app.warning, app.error)
    found = "\n".join(str(item.value) for kind in kinds for item in kind)
    labels = "\n".join(item.label for item in app.expander)
    return re.sub(r"\\.", "", f"{found}\n{labels}")


def titles(app: AppTest) -> list[str]:
    """Section titles of a page."""
    return [item.value[6:] for item in app.markdown if item.value.startswith("##### ")]


def tiles(app: AppTest) -> dict[str, str]:
    """The values at the top of a page by label."""
    return {item.label: item.value for item in app.metric}


def figures(app: AppTest) -> list[dict[str, Any]]:
    """The charts of a page as Plotly's JSON."""
    return [json.loads(item.proto.spec) for item in app.get("plotly_chart")]
