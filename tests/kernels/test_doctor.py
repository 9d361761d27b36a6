"""What `doctor` finds to clash: packages that pin each other, drivers, GPUs torch cannot run on."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from nmoe_kernels import hardware
from nmoe_kernels.hardware import Gpu
from packaging.specifiers import SpecifierSet
from packaging.version import Version

SPECIFIERS = (
    "==4.4.2",
    "==4.4",
    "==4.4.*",
    "!=4.4.2",
    "!=4.5.*",
    ">=4.4.2",
    "<=2.9.1,>=2.7.1",
    "<0.2,>=0.1.6",
    "~=4.4.1",
    "~=4.4",
    ">4,<5",
    "",
)
VERSIONS = ("4.4.2", "4.4", "4.4.10", "4.5.0", "5", "2.9.1", "2.11.0", "0.1.15", "0.2", "0.1.6")


@pytest.mark.parametrize("specifier", SPECIFIERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_versions_are_compared_as_the_packaging_library_does(version: str, specifier: str) -> None:
    want = Version(version) in SpecifierSet(specifier)
    assert hardware._fits(version, specifier) == want


def test_local_parts_of_versions_do_not_count() -> None:
    assert hardware._fits("2.11.0+cu130", "==2.11.0")
    assert hardware._fits("2.11.0", "==2.11.0+cu130")
    assert not hardware._fits("2.11.1+cu130", "==2.11.0")


@pytest.mark.parametrize(
    ("line", "name", "specifier"),
    [
        ("nvidia-cutlass-dsl==4.4.2", "nvidia-cutlass-dsl", "==4.4.2"),
        ("apache-tvm-ffi<0.2,>=0.1.6", "apache-tvm-ffi", "<0.2,>=0.1.6"),
        (
            "cuda-toolkit[nvcc,nvrtc]==13.0.2; platform_system == 'Linux'",
            "cuda-toolkit",
            "==13.0.2",
        ),
        ("torch (<=2.9.1, >=2.7.1)", "torch", "<=2.9.1,>=2.7.1"),
        ("torch", "torch", ""),
    ],
)
def test_a_requirement_is_split(line: str, name: str, specifier: str) -> None:
    assert hardware._split_requirement(line) == (name, specifier)


def install(folder: Path, name: str, version: str, *needs: str) -> None:
    """A package of this name, as far as its metadata goes."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_a_compiler_that_its_users_do_not_want_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "nvidia-cutlass-dsl", "4.6.0", "nvidia-cutlass-dsl-libs-base==4.6.0")
    install(tmp_path, "nvidia-cutlass-dsl-libs-base", "4.4.2")
    install(
        tmp_path,
        "sonic-moe",
        "0.1.2.post1",
        "nvidia-cutlass-dsl==4.4.2",
        "quack-kernels>=0.3.11",
        'nvidia-cutlass-dsl[cu13]>=9; extra == "cu13"',
    )
    install(tmp_path, "quack-kernels", "0.3.10", "nvidia-cutlass-dsl>=4.4.2", "absent-one==1")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = hardware._package_clashes()
    assert [clash for clash in found if "cutlass" in clash or "quack" in clash] == [
        "sonic-moe wants nvidia-cutlass-dsl 4.4.2, 4.6.0 is installed",
        "sonic-moe wants quack-kernels >=0.3.11, 0.3.10 is installed",
        "nvidia-cutlass-dsl wants nvidia-cutlass-dsl-libs-base 4.6.0, 4.4.2 is installed",
    ]


def test_doctor_prints_a_clash(tmp_path: Path) -> None:
    install(tmp_path, "quack-kernels", "0.3.11", "nvidia-cutlass-dsl>=4.4.2")
    install(tmp_path, "nvidia-cutlass-dsl", "4.3.0")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['doctor'];"
        "from nmoe_kernels.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = "clash: quack-kernels wants nvidia-cutlass-dsl >=4.4.2, 4.3.0 is installed"
    assert wanted in done.stdout


def test_what_is_locked_together_does_not_clash() -> None:
    assert importlib.metadata.version("torch")
    assert hardware._package_clashes() == []


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_80"], False),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_89"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((9, 0), ["compute_100"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((10, 3), ["sm_100", "sm_120"], True),
        ((9, 0), ["gfx942"], False),
    ],
)
def test_a_gpu_without_code_in_torch_is_a_clash(
    capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    gpus = (Gpu("One", capability, 80.0), Gpu("One", capability, 80.0))
    found = hardware._gpu_clashes(gpus, built_for)
    dotted = ".".join(map(str, capability))
    assert found == ([] if runs else [f"torch has no code for One (capability {dotted})"])
