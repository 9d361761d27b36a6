"""`python -m nmoe_train`: the console script by another name, so that torchrun can start it."""

from nmoe_train.cli import main

main()
