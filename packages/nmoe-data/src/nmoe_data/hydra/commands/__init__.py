"""The commands of `nmoe-data hydra`; what they need is imported when one of them runs."""

import typer

from nmoe_data.hydra.commands.filter import filter_command
from nmoe_data.hydra.commands.label import label_command
from nmoe_data.hydra.commands.report import report_command
from nmoe_data.hydra.commands.train import calibrate_command, train_command

hydra_app = typer.Typer(
    help="Grade a sample with an LLM, learn its grades, filter a corpus by them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
hydra_app.command("label")(label_command)
hydra_app.command("train")(train_command)
hydra_app.command("calibrate")(calibrate_command)
hydra_app.command("filter")(filter_command)
hydra_app.command("report")(report_command)
