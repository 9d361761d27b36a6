"""`python -m nmoe_data`: the console script by another name."""

from nmoe_data.cli import main

main()
