"""Compiles every Triton kernel for each GPU generation on a machine without one, and looks inside.

A kernel's promise is a set of instructions: the matrix unit of the generation (wgmma on sm_90a,
tcgen05 on sm_100a) and the copy engine's bulk tensor copies. They are counted in the PTX; registers
and local memory, which is where registers spill to, are read off the machine code.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nmoe_kernels.errors import KernelError
from nmoe_kernels.gemm import plan, tiles
from nmoe_kernels.gemm.plan import TILE_ROWS
from nmoe_kernels.gemm.triton import COLUMNS, GROUP, INNER, STAGES, WARPS

GENERATIONS = {"sm_90a": 90, "sm_100a": 100}
MATRIX_UNIT = {"sm_90a": r"wgmma\.mma_async", "sm_100a": r"tcgen05\.mma"}
BULK_COPY = r"cp\.async\.bulk\.tensor"
HALF = COLUMNS // 2


@dataclass(frozen=True)
class Kernel:
    """A kernel with one choice of its constants, and what its code must hold."""

    name: str
    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    multiplies: bool = False
    warps: int = WARPS
    stages: int = STAGES


@dataclass
class Finding:
    """What a kernel became for one generation."""

    kernel: str
    generation: str
    matrix: int
    bulk_copies: int
    registers: int
    spilled_bytes: int
    broken: list[str] = field(default_factory=list)
    """Promises that the code does not keep."""


def kernels() -> Iterator[Kernel]:
    """Every kernel of the package with every choice that is launched."""
    index = {"tile_expert_ptr": "*i32", "tiles_ptr": "*i32"}
    walk = {"GROUP": GROUP, "PROGRAMS": 132}
    for even in (True, False):
        yield Kernel(
            f"up, {'whole' if even else 'cut'} inner blocks",
            tiles.up_kernel,
            {
                "x_ptr": "*bf16",
                "token_ptr": "*i32",
                "weight": _block(1, 2, HALF, INNER),
                "h": _block(TILE_ROWS, 1, HALF),
                "a": _block(TILE_ROWS, HALF),
                **index,
                "width": "i32",
                "expert_width": "i32",
            },
            {"TILE": TILE_ROWS, "BN": HALF, "BK": INNER, "EVEN": even, **walk},
            multiplies=True,
        )
    for transposed in (False, True):
        for halves in (False, True):
            weight = (1, INNER, COLUMNS) if transposed else (1, COLUMNS, INNER)
            yield Kernel(
                f"rows, {'W' if transposed else 'W^T'}, {'halves' if halves else 'whole'}",
                tiles.rows_kernel,
                {
                    "rows": _block(TILE_ROWS, INNER),
                    "weight": _block(*weight),
                    "out": _block(TILE_ROWS, HALF if halves else COLUMNS),
                    **index,
                    "inner_width": "i32",
                    "columns": "i32",
                },
                {
                    "TRANSPOSED": transposed,
                    "TILE": TILE_ROWS,
                    "BN": COLUMNS,
                    "BK": INNER,
                    "HALVES": halves,
                    **walk,
                },
                multiplies=True,
            )
    yield Kernel(
        "weight gradient",
        tiles.weight_grad_kernel,
        {
            "left": _block(INNER, TILE_ROWS),
            "right": _block(INNER, COLUMNS),
            "out": _block(1, TILE_ROWS, COLUMNS),
            "offsets_ptr": "*i32",
            "left_width": "i32",
            "right_width": "i32",
            "experts": "i32",
        },
        {"BM": TILE_ROWS, "BN": COLUMNS, "BK": INNER, **walk},
        multiplies=True,
    )
    yield from _movers()


def _movers() -> Iterator[Kernel]:
    """The kernels that only move and add."""
    narrow: dict[str, Any] = {"warps": 4, "stages": 3}
    rows = {"token_ptr": "*i32", "tiles_ptr": "*i32", "width": "i32"}
    yield Kernel(
        "SwiGLU backward",
        tiles.swiglu_backward_kernel,
        {
            "h_ptr": "*bf16",
            "grad_a_ptr": "*bf16",
            "weight_ptr": "*fp32",
            "flat_ptr": "*i32",
            "grad_h_ptr": "*bf16",
            "grad_weight_ptr": "*fp32",
            "tiles_ptr": "*i32",
            "expert_width": "i32",
        },
        {"TILE": TILE_ROWS, "BLOCK": 2048},
        **narrow,
    )
    yield Kernel(
        "gather",
        tiles.gather_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16", **rows},
        {"TILE": TILE_ROWS, "BLOCK": 2048},
        **narrow,
    )
    for weighted in (True, False):
        yield Kernel(
            f"sum of slots, {'weighted' if weighted else 'plain'}",
            tiles.sum_slots_kernel,
            {
                "rows_ptr": "*bf16",
                "inverse_ptr": "*i32",
                "weight_ptr": "*fp32" if weighted else "*bf16",
                "out_ptr": "*bf16",
                "width": "i32",
            },
            {"SLOTS": 8, "WEIGHTED": weighted, "BLOCK": 2048},
            **narrow,
        )
    sizes = {"BLOCK": 128, "EXPERTS": 128}
    counted = {"assignments": "i32", "experts": "i32"}
    yield Kernel(
        "plan, count",
        plan.count_kernel,
        {"ids_ptr": "*i64", "counts_ptr": "*i32", **counted},
        sizes,
        **narrow,
    )
    yield Kernel(
        "plan, scan",
        plan.scan_kernel,
        {"counts_ptr": "*i32", "totals_ptr": "*i32", "blocks": "i32"},
        {"EXPERTS": 128, "CHUNK": 1024},
        **narrow,
    )
    pointers = ("before", "totals", "token", "flat", "inverse", "offsets", "tile_expert", "tiles")
    yield Kernel(
        "plan, place",
        plan.place_kernel,
        {
            "ids_ptr": "*i64",
            **{f"{name}_ptr": "*i32" for name in pointers},
            **counted,
            "slots": "i32",
        },
        {"TILE": TILE_ROWS, **sizes},
        **narrow,
    )


def check(kernel: Kernel, generation: str) -> Finding:
    """Compiles one kernel for one generation and counts what its code holds.

    Raises KernelError E-COMPILE with the compiler's first line when it does not compile.
    """
    source = ASTSource(
        fn=kernel.function,
        signature=_signature(kernel),
        constexprs={
            (kernel.function.arg_names.index(name),): value
            for name, value in kernel.constants.items()
        },
        attrs=_alignment(kernel),
    )
    options = {
        "num_warps": kernel.warps,
        "num_stages": kernel.stages,
        "enable_fp_fusion": True,
    }
    target = GPUTarget("cuda", GENERATIONS[generation], 32)
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever the compiler's stages raise, it is the same news
        raise KernelError(
            "E-COMPILE",
            f"{kernel.name} does not compile for {generation} ({str(error).splitlines()[0]})",
            "mend the kernel, or use a version of triton that compiles it",
        ) from error
    return _inspect(kernel, generation, compiled.asm)


def _inspect(kernel: Kernel, generation: str, code: dict[str, Any]) -> Finding:
    registers, spilled = _resources(code["cubin"])
    ptx = code["ptx"]
    finding = Finding(
        kernel.name,
        generation,
        matrix=len(re.findall(MATRIX_UNIT[generation], ptx)),
        bulk_copies=len(re.findall(BULK_COPY, ptx)),
        registers=registers,
        spilled_bytes=spilled,
    )
    if kernel.multiplies and not finding.matrix:
        finding.broken.append("no instruction of the matrix unit")
    if kernel.multiplies and not finding.bulk_copies:
        finding.broken.append("no bulk tensor copy")
    return finding


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, as the machine code declares them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def _signature(kernel: Kernel) -> dict[str, str]:
    names = kernel.function.arg_names
    return {name: "constexpr" if name in kernel.constants else kernel.types[name] for name in names}


def _alignment(kernel: Kernel) -> dict[tuple[int], list[list[Any]]]:
    """Pointers and widths are multiples of 16 where the kernels are launched on real shapes."""
    names = kernel.function.arg_names
    aligned = (
        number
        for number, name in enumerate(names)
        if kernel.types.get(name, "").startswith("*") or name.endswith(("width", "columns"))
    )
    return {(number,): [["tt.divisibility", 16]] for number in aligned}


def _block(*shape: int) -> str:
    """Type of a descriptor of bf16 with this block."""
    return f"tensordesc<bf16[{','.join(map(str, shape))}]>"
