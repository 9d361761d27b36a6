"""Names of the environment variables through which the command tells the pages what to show."""

RUNS_VARIABLE = "NVIZ_RUNS"
TOKEN_VARIABLE = "NVIZ_TOKEN"
RULES_VARIABLE = "NVIZ_RULES"
