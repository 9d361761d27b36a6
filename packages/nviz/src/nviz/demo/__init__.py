"""Writes seeded, realistic run folders, to try the dashboard on and to measure it with.

The files are those that nmoe-train writes; what is in them is drawn from formulas, not trained.
Modules, bottom first: `plan`, `signals`, `dataset`, `folder`, `generate`.
"""

from nviz.demo.generate import Progress, write_demo

__all__ = ["Progress", "write_demo"]
