"""Each package works from its wheel alone, in an environment that holds nothing else."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["nmoe-kernels", "nmoe-data", "nmoe-train", "nviz"]
WITHOUT_TORCH = ["nmoe-data", "nviz"]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    run("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The locked versions, so that a release of somebody else's cannot fail this test."""
    file = tmp_path_factory.mktemp("lock") / "constraints.txt"
    options = ("--frozen", "--all-packages", "--all-extras", "--no-hashes", "--no-emit-workspace")
    file.write_text(run("uv", "export", "--quiet", *options))
    return file


@pytest.fixture(params=PACKAGES)
def installed(
    request: pytest.FixtureRequest, wheels: Path, constraints: Path, tmp_path: Path
) -> tuple[str, Path]:
    """A package's name, and the bin folder of an environment with its wheel."""
    package: str = request.param
    (wheel,) = wheels.glob(f"{package.replace('-', '_')}-*.whl")
    run("uv", "venv", "--quiet", tmp_path / "venv")
    binaries = tmp_path / "venv" / "bin"
    options = ("--python", binaries / "python", "--find-links", wheels, "-c", constraints)
    run("uv", "pip", "install", "--quiet", *options, wheel, cwd=tmp_path)
    return package, binaries


@pytest.mark.slow
def test_wheel_installs_alone_and_its_console_script_starts(installed: tuple[str, Path]) -> None:
    package, binaries = installed
    assert "Usage" in run(binaries / package, "--help", cwd=binaries)
    module = package.replace("-", "_")
    run(binaries / "python", "-c", f"import {module}", cwd=binaries)
    if package in WITHOUT_TORCH:
        find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"
        run(binaries / "python", "-c", find, cwd=binaries)
    if package == "nmoe-train":
        checked = "from nmoe_train.presets import QUICKSTART; print(QUICKSTART)"
        preset = run(binaries / "python", "-c", checked, cwd=binaries).strip()
        assert "is valid" in run(binaries / "nmoe-train", "validate", preset, cwd=binaries)
