"""Finds run folders and reads their files, while a trainer may still be writing them."""

from nviz.store.columns import ColumnReader, Rows
from nviz.store.events import Event
from nviz.store.experts import ExpertLoads
from nviz.store.hydra import HydraFolder
from nviz.store.runs import Run, RunIndex
from nviz.store.summary import Summary
from nviz.store.workspace import Workspace

__all__ = [
    "ColumnReader",
    "Event",
    "ExpertLoads",
    "HydraFolder",
    "Rows",
    "Run",
    "RunIndex",
    "Summary",
    "Workspace",
]
