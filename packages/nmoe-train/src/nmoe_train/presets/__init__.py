"""Configurations that come with the package, as TOML files beside this one."""

from pathlib import Path

QUICKSTART = Path(__file__).with_name("quickstart.toml")
DRILL = Path(__file__).with_name("drill.toml")
