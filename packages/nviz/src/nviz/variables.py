"""Names of the environment variables through which the command tells the pages what to show."""

RUNS_VARIABLE = "NVIZ_RUNS"
URL_VARIABLE = "NVIZ_RUNS_URL"
TOKEN_VARIABLE = "NVIZ_TOKEN"
RULES_VARIABLE = "NVIZ_RULES"
