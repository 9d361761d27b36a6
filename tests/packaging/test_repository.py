"""What must hold for the repository itself: the lock file, hosts, links of the documents."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "packages/*/*.md", "apps/**/*.md", "infra/**/*.md")
    for path in ROOT.glob(pattern)
)


def test_no_committed_file_names_a_registry_host() -> None:
    script = ROOT / "infra" / "ci" / "no-hosts.sh"
    result = subprocess.run(["bash", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_lock_file_is_normalised_once_and_for_all() -> None:
    spec = importlib.util.spec_from_file_location("normalise", ROOT / "infra/lock/normalise.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lock = (
        'source = { registry = "https://registry.example/simple" }\n'
        'sdist = { url = "https://a.example/b/name-1.0.tar.gz", hash = "sha256:1", size = 2 }\n'
    )
    once = module.normalise(lock)
    assert once == (
        'source = { registry = "pypi" }\n'
        'sdist = { filename = "name-1.0.tar.gz", hash = "sha256:1", size = 2 }\n'
    )
    assert module.normalise(once) == once


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document} links to {target}"


def test_tables_are_what_the_results_say() -> None:
    command = [sys.executable, ROOT / "infra" / "bench" / "tables.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
