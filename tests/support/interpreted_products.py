"""Runs the benchmark's Triton contender in Triton's interpreter on the CPU; prints its error.

A program of its own, since TRITON_INTERPRET must be set before a kernel is imported. It takes a
shape as T,H,I,E,K and a routing. A second figure is the error with one expert's rows exchanged,
which the benchmark must find.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from nmoe_kernels.bench.gemm import our_products, products_error, random_rows
from nmoe_kernels.bench.shapes import Shape


def main(shape: str, routing: str) -> None:
    """Writes both errors."""
    sizes = Shape(*map(int, shape.split(",")))
    rows = random_rows(sizes, routing, torch.float16, torch.device("cpu"))
    products, places = our_products(rows)
    error = products_error(rows, products, places)
    wrong = products_error(rows, products, places.roll(1))
    sys.stdout.write(json.dumps([error, wrong]))


if __name__ == "__main__":
    main(*sys.argv[1:])
