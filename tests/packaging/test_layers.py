"""Imports point down only: between packages, and between the modules of one."""

import ast
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
MODULES = {
    "nmoe_kernels": "nmoe-kernels",
    "nmoe_data": "nmoe-data",
    "nmoe_train": "nmoe-train",
    "nviz": "nviz",
}
MAY_IMPORT = {
    "nmoe_kernels": {"nmoe_kernels"},
    "nmoe_data": {"nmoe_data"},
    "nmoe_train": {"nmoe_train", "nmoe_kernels", "nmoe_data"},
    "nviz": {"nviz"},
}
WITHOUT_TORCH = {"nmoe_data", "nviz"}
# Bottom first. A module may import those on earlier lines; those on one line may share.
ORDER = {
    "nmoe_kernels": [
        "errors",
        "hardware",
        "router",
        "grouping",
        "gemm",
        "layer",
        "report bench compile_check",
        "cli",
        "__main__",
    ],
    "nmoe_data": [
        "errors",
        "files",
        "tokenizer",
        "shards",
        "sources",
        "prep",
        "loader inspect",
        "stats",
        "cli",
        "__main__",
    ],
    "nmoe_train": [
        "errors randomness interrupt",
        "config presets",
        "model",
        "data",
        "optim parallel telemetry checkpoint eval",
        "step",
        "loop",
        "console",
        "run",
        "cli",
        "__main__",
    ],
    "nviz": [
        "errors variables",
        "formats",
        "store",
        "queries",
        "charts",
        "shell",
        "pages",
        "app",
        "cli",
        "__main__",
    ],
}


def imports_of(file: Path) -> set[str]:
    """Dotted names that a file imports, relative ones made absolute."""
    source = file.parents[len(file.parts) - file.parts.index("src") - 2]
    package = file.relative_to(source).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names.add(".".join([*base, *([node.module] if node.module else [])]))
    return names


def files_of(module: str) -> list[Path]:
    folder = PACKAGES / MODULES[module] / "src" / module
    files = sorted(folder.rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("module", MODULES)
def test_package_imports_no_package_above_it(module: str) -> None:
    for file in files_of(module):
        ours = {name.split(".")[0] for name in imports_of(file)} & MODULES.keys()
        assert ours <= MAY_IMPORT[module], f"{file} imports {ours - MAY_IMPORT[module]}"


@pytest.mark.parametrize("module", sorted(WITHOUT_TORCH))
def test_package_runs_without_torch(module: str) -> None:
    for file in files_of(module):
        roots = {name.split(".")[0] for name in imports_of(file)}
        assert "torch" not in roots, f"{file} imports torch"


@pytest.mark.parametrize("module", ORDER)
def test_module_imports_no_module_above_it(module: str) -> None:
    rank = {name: level for level, names in enumerate(ORDER[module]) for name in names.split()}
    folder = PACKAGES / MODULES[module] / "src" / module
    for file in files_of(module):
        own = file.relative_to(folder).with_suffix("").parts[0]
        if own == "__init__":
            continue
        assert own in rank, f"{own} has no place in the order of {module}"
        for name in imports_of(file):
            parts = name.split(".")
            if parts[0] == module and len(parts) > 1 and parts[1] != own:
                assert rank[parts[1]] <= rank[own], f"{file} imports {name} from above"
