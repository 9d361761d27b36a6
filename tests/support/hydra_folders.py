"""The four folders of the judge pipeline, made as nmoe-data makes them, with heads by chance."""

import json
from dataclasses import replace
from pathlib import Path

import nmoe_data.hydra.filter.run as filter_run
import pytest
from hydra_heads import make_heads
from hydra_labels import write_label_folder
from inline_executor import InlineExecutor
from judge_server import hidden_scores
from nmoe_data.hydra.calibrate import CurvePoint
from nmoe_data.hydra.filter import FilterSettings, filter_corpus
from nmoe_data.hydra.heads import save_heads
from nmoe_data.hydra.report import make_report


def write_hydra_folders(folder: Path, texts: list[str]) -> None:
    """Write labels, heads, filtered and report below `folder`.

    The acceptance curve is made up: from threshold t on a share 1 - t is kept, of precision t.
    """
    write_label_folder(folder / "labels", texts, {"judge": hidden_scores})
    heads = make_heads(folder / "heads", texts)
    assert heads.calibration is not None
    points = tuple(
        CurvePoint(at / 10, (1 - at / 10,) * 3, (at / 10,) * 3, (float("nan"),) * 3)
        for at in range(11)
    )
    save_heads(
        folder / "heads", replace(heads, calibration=replace(heads.calibration, curve=points))
    )
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filter_run, "ProcessExecutor", InlineExecutor)
        filter_corpus(str(source), folder / "heads", folder / "filtered", FilterSettings())
    make_report(folder / "heads", folder / "labels", folder / "report")
