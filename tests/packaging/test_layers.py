"""Imports point down only: between packages, and between the modules of one."""

import ast
from collections.abc import Iterator
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
# In these folders functions may import torch, and these files may need it: they are imported late.
TORCH_IN_FUNCTIONS = {"nmoe_data": ("hydra",)}
NEED_TORCH = {
    "nmoe_data": {"hydra/networks.py", "hydra/encoder/huggingface.py"},
}
# Bottom first. A module may import those on earlier lines; those on one line may share.
ORDER = {
    "nmoe_kernels": [
        "errors",
        "hardware tensors",
        "router",
        "grouping",
        "gemm",
        "experts",
        "rdep",
        "layer",
        "report bench compile_check",
        "cli",
        "__main__",
    ],
    "nmoe_data": [
        "errors",
        "files console",
        "tokenizer",
        "shards",
        "sources",
        "prep",
        "loader inspect",
        "stats",
        "hydra",
        "cli",
        "__main__",
    ],
    "nmoe_data.hydra": [
        "rubric documents extras agreement",
        "labels prompt reply encoder",
        "client calibrate embeddings networks ridge",
        "grading heads",
        "session train calibrated",
        "batches injection filter",
        "labelling report",
        "commands",
    ],
    "nmoe_train": [
        "errors randomness interrupt",
        "config presets device storage",
        "model",
        "data",
        "optim",
        "parallel",
        "telemetry",
        "checkpoint",
        "saves eval",
        "plan",
        "elastic",
        "step",
        "loop",
        "console",
        "run",
        "elastic_run",
        "drill",
        "cli",
        "__main__",
    ],
    "nmoe_train.elastic": [
        "membership probes cut",
        "link",
        "heartbeat coordinator snapshot",
        "session",
        "recover launcher",
    ],
    "nmoe_train.drill": ["plan orders", "sabotage inject", "report", "run", "command"],
    "nviz": [
        "errors variables",
        "formats demo",
        "store",
        "alerts queries",
        "charts",
        "figures hydra_figures router_figures panels",
        "shell export",
        "pages",
        "app",
        "cli",
        "__main__",
    ],
}


def imports_of(file: Path, in_functions: bool = True) -> set[str]:
    """Dotted names that a file imports, relative ones made absolute."""
    source = file.parents[len(file.parts) - file.parts.index("src") - 2]
    package = file.relative_to(source).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in nodes_of(ast.parse(file.read_text()), in_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names.add(".".join([*base, *([node.module] if node.module else [])]))
    return names


def nodes_of(tree: ast.AST, in_functions: bool) -> Iterator[ast.AST]:
    """All nodes below, or those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from nodes_of(node, in_functions)


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
    folder = PACKAGES / MODULES[module] / "src" / module
    for file in files_of(module):
        path = file.relative_to(folder).as_posix()
        if path in NEED_TORCH.get(module, set()):
            continue
        late = path.startswith(TORCH_IN_FUNCTIONS.get(module, ()))
        roots = {name.split(".")[0] for name in imports_of(file, in_functions=not late)}
        assert "torch" not in roots, f"{file} imports torch"


@pytest.mark.parametrize("folder", ORDER)
def test_module_imports_no_module_above_it(folder: str) -> None:
    rank = {name: level for level, names in enumerate(ORDER[folder]) for name in names.split()}
    package = folder.split(".")
    root = PACKAGES / MODULES[package[0]] / "src" / Path(*package)
    for file in sorted(root.rglob("*.py")):
        own = file.relative_to(root).with_suffix("").parts[0]
        if own == "__init__":
            continue
        assert own in rank, f"{own} has no place in the order of {folder}"
        for name in imports_of(file):
            parts = name.split(".")
            inside = parts[: len(package)] == package and len(parts) > len(package)
            if inside and parts[len(package)] != own:
                assert rank[parts[len(package)]] <= rank[own], f"{file} imports {name} from above"
