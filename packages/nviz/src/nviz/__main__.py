"""`python -m nviz` is the console script."""

from nviz.cli import main

main()
