"""Rules over runs: what they say, when they hold, and whom they are told to.

Modules, bottom first: `rules` reads them from TOML, `check` asks whether they hold, `deliver`
writes events and calls a webhook, `watch` does both again and again.
"""

from nviz.alerts.check import Alert, Facts, broken_rules, facts_of_files, facts_of_summary
from nviz.alerts.deliver import Webhook, write_event
from nviz.alerts.rules import DEFAULT_RULES, Rule, read_rules
from nviz.alerts.watch import Change, Watch

__all__ = [
    "DEFAULT_RULES",
    "Alert",
    "Change",
    "Facts",
    "Rule",
    "Watch",
    "Webhook",
    "broken_rules",
    "facts_of_files",
    "facts_of_summary",
    "read_rules",
    "write_event",
]
