"""Which backend is picked, what is said about it, and the doctor command."""

import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nmoe_kernels
import pytest
import torch
from nmoe_kernels import KernelError, MoE, RouterConfig, cli, describe, hardware, pick_backend


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch):
    monkeypatch.delenv(hardware.BACKEND_VARIABLE, raising=False)
    hardware._announce.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_is_the_default_on_cpu(dtype):
    assert pick_backend(None, "cpu", dtype) == "torch"


def test_fp64_goes_to_the_reference_and_the_log_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="nmoe_kernels"):
        assert pick_backend(None, "cpu", torch.float64) == "reference"
        pick_backend(None, "cpu", torch.float64)
    assert caplog.messages == ["experts: backend reference for float64 on cpu (first usable)"]


def test_a_forced_backend_is_taken(monkeypatch):
    monkeypatch.setenv(hardware.BACKEND_VARIABLE, "reference")
    assert pick_backend(None, "cpu", torch.float32) == "reference"
    assert pick_backend("torch", "cpu", torch.float32) == "torch"


def test_a_forced_backend_that_cannot_run_is_an_error_with_the_reason(monkeypatch):
    with pytest.raises(KernelError, match=r"E-BACKEND-UNAVAILABLE: .*asked for.*: .*Double"):
        pick_backend("torch", "cpu", torch.float64)
    monkeypatch.setenv(hardware.BACKEND_VARIABLE, "torch")
    layer = MoE(8, 4, RouterConfig(4, 2, "softmax"), dtype=torch.float64)
    layer.reset_parameters()
    with pytest.raises(KernelError, match=r"E-BACKEND-UNAVAILABLE: .*set by NMOE_KERNELS_BACKEND"):
        layer(torch.randn(2, 8, dtype=torch.float64))


def test_an_unknown_backend_is_an_error_that_lists_the_known():
    with pytest.raises(KernelError, match=r"E-BACKEND-UNKNOWN: .*'cuda'.*torch, reference"):
        pick_backend("cuda", "cpu", torch.float32)


def test_torch_without_grouped_mm_is_said(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    hardware._grouped_mm_refusal.cache_clear()
    assert "no grouped_mm" in hardware.why_unusable("torch", "cpu", torch.float32)
    assert pick_backend(None, "cpu", torch.float32) == "reference"
    monkeypatch.undo()
    hardware._grouped_mm_refusal.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    """A machine as `pick_backend` sees it: an H200 with the packages of the extra `cute`; both."""
    found = {"capability": (9, 0), "triton": "3.9.0", **hardware.CUTE_RELEASES}
    monkeypatch.setattr(hardware, "installed", lambda name: found.get(name, ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found["capability"])
    caches = (hardware._triton_refusal, hardware._quack_refusal, hardware._announce)
    for function in caches:
        function.cache_clear()
    yield found
    for function in caches:
        function.cache_clear()


def test_cute_comes_first_where_its_releases_are(hopper):
    assert pick_backend(None, "cuda", torch.bfloat16) == "cute"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"quack-kernels": ""}, "it needs quack-kernels 0.3.11, which is not installed: pip"),
        ({"quack-kernels": "0.6.5"}, "quack-kernels 0.3.11, which is 0.6.5 here"),
        ({"nvidia-cutlass-dsl": "4.8.1"}, "nvidia-cutlass-dsl 4.4.2, which is 4.8.1 here"),
        ({"capability": (10, 0)}, "those of capability 9.0, and this GPU has 10.0"),
    ],
)
def test_cute_says_why_it_is_not_used_and_triton_is_picked(hopper, changed, told):
    hopper.update(changed)
    assert told in hardware.why_unusable("cute", "cuda", torch.bfloat16)
    assert pick_backend(None, "cuda", torch.bfloat16) == "triton"
    with pytest.raises(KernelError, match="E-BACKEND-UNAVAILABLE"):
        pick_backend("cute", "cuda", torch.bfloat16)


def test_package_clashes_are_found(monkeypatch):
    lines = ["triton==0.0.1; platform_system == 'Linux'", "absent-package==1.0", "numpy>=1.0"]
    monkeypatch.setattr(hardware, "_requirements", lambda name: lines if name == "torch" else [])
    installed = {"triton": "3.9.0"}
    monkeypatch.setattr(hardware, "installed", lambda name: installed.get(name, ""))
    assert hardware._package_clashes() == ["torch wants triton 0.0.1, 3.9.0 is installed"]


@pytest.mark.parametrize(
    ("driver", "runtime", "clashes"),
    [
        ("12.8", "13.2", 1),
        ("13.0", "13.2", 0),
        ("13.2", "12.9", 0),
        ("", "13.2", 0),
        ("", "", 0),
        ("13.0", "", 1),
        ("9.0", "10.1", 1),
    ],
)
def test_a_driver_of_an_older_major_version_is_a_clash(driver, runtime, clashes):
    assert len(hardware._driver_clashes(driver, runtime)) == clashes


def test_doctor_shows_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nmoe-kernels", "doctor"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "reference" in out
    assert "picked for float32 on" in out
    assert describe().python in out


def test_doctor_reports_a_bad_setting_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv(hardware.BACKEND_VARIABLE, "warp")
    monkeypatch.setattr(sys, "argv", ["nmoe-kernels", "doctor"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error E-BACKEND-UNKNOWN")
    assert err.count("\n") == 1


def test_ctrl_c_is_one_line_and_130(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(hardware, "describe", interrupted)
    monkeypatch.setattr(sys, "argv", ["nmoe-kernels", "doctor"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_version_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nmoe-kernels", "--version"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert (stop.value.code, capsys.readouterr().out) == (0, nmoe_kernels.__version__ + "\n")


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "nmoe_kernels", "--version"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_each_declared_dependency_is_imported():
    package = Path(nmoe_kernels.__file__).parent
    project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    source = "\n".join(path.read_text() for path in package.rglob("*.py"))
    # One is declared for its release alone, which another needs.
    imported_as = {"quack-kernels": "quack", "nvidia-cutlass-dsl": "quack"}
    for requirement in (*project["dependencies"], *(line for extra in extras for line in extra)):
        name = re.match(r"[\w-]+", requirement)[0]
        module = imported_as.get(name, name)
        assert re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE), name


def test_help_does_not_load_torch():
    code = (
        "import sys; from nmoe_kernels.cli import app; app(['--help'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def test_every_public_name_is_there():
    assert all(getattr(nmoe_kernels, name) for name in nmoe_kernels.__all__)
    with pytest.raises(AttributeError):
        _ = nmoe_kernels.absent
