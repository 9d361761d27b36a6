"""`python -m nmoe_kernels`: the console script by another name."""

from nmoe_kernels.cli import main

main()
