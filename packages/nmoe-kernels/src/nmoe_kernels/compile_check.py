"""Compiles every Triton kernel for each GPU generation on a machine without one, and looks inside.

A kernel's promise is a set of instructions: the matrix unit of the generation (wgmma on sm_90a,
tcgen05 on sm_100a) and the copy engine's bulk tensor copies. They are counted in the PTX; registers
and local memory, which is where registers spill to, are read off the machine code. Sizes are taken
to be multiples of 16, as those of real layers are.
"""

import itertools
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
from nmoe_kernels.gemm.launches import CANDIDATES, Launch
from nmoe_kernels.gemm.plan import TILE_ROWS, RowPlan
from nmoe_kernels.gemm.products import CLEARED_ROWS
from nmoe_kernels.rdep import kernels as rdep
from nmoe_kernels.rdep.memory import MOST_CHUNKS
from nmoe_kernels.rdep.plan import PLANNED_TOKENS
from nmoe_kernels.rdep.protocol import AREAS
from nmoe_kernels.rdep.transports import p2p
from nmoe_kernels.router import kernels as router
from nmoe_kernels.router.triton import GRAD_COLUMNS, NARROW_GRAD, PARTS, WIDE_GRAD

GENERATIONS = {"sm_90a": 90, "sm_100a": 100}
MATRIX_UNIT = {"sm_90a": r"wgmma\.mma_async", "sm_100a": r"tcgen05\.mma"}
BULK_COPY = r"cp\.async\.bulk\.tensor"
# How the sizes are called that are multiples of 16 in real layers.
ROUND = ("width", "columns", "tokens", "plane", "piece", "_at")


@dataclass(frozen=True)
class Kernel:
    """A kernel with one choice of its constants, and what its code must hold."""

    name: str
    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    multiplies: bool = False
    copies: bool = True
    warps: int = 4
    stages: int = 3


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
    """Every kernel of the package with every choice that can be launched."""
    yield from _products()
    yield from _movers()
    yield from _plans()
    yield from _router()
    yield from _exchange()


def _products() -> Iterator[Kernel]:
    """The products of the expert MLP, with each candidate of their launches."""
    index = {"tile_expert_ptr": "*i32", "tiles_ptr": "*i32"}
    for product, candidates in CANDIDATES.items():
        for launch in candidates:
            if product == "up":
                yield from _up(launch, index)
            elif product in ("grad_down", "grad_gate_up"):
                yield _weight_grad(product, launch)
            else:
                yield _rows(product, launch, index)


def _up(launch: Launch, index: dict[str, str]) -> Iterator[Kernel]:
    half = launch.columns // 2
    types = {
        "x_ptr": "*bf16",
        "token_ptr": "*i32",
        "weight": _block("bf16", 1, 2, half, launch.inner),
        "h": _block("bf16", TILE_ROWS, 1, half),
        "a": _block("bf16", TILE_ROWS, half),
        **index,
        "width": "i32",
        "expert_width": "i32",
    }
    for even, keep_h in ((True, True), (False, True), (True, False)):
        constants = {"KEEP_H": keep_h, "EVEN": even, "TILE": TILE_ROWS, "BN": half}
        name = f"up, {'h kept' if keep_h else 'h not kept'}, {'whole' if even else 'cut'} steps"
        yield _product(name, tiles.up_kernel, types, constants, launch)


def _rows(product: str, launch: Launch, index: dict[str, str]) -> Kernel:
    columns, inner = launch.columns, launch.inner
    weight = (1, columns, inner) if product == "down" else (1, inner, columns)
    types = {
        "rows": _block("bf16", TILE_ROWS, inner),
        "weight": _block("bf16", *weight),
        "out": _block("bf16", TILE_ROWS, columns // 2 if launch.halves else columns),
        **index,
        "inner_width": "i32",
        "columns": "i32",
    }
    constants = {
        "TRANSPOSED": product != "down",
        "TILE": TILE_ROWS,
        "BN": columns,
        "HALVES": launch.halves,
    }
    return _product(product, tiles.rows_kernel, types, constants, launch)


def _weight_grad(product: str, launch: Launch) -> Kernel:
    types = {
        "left": _block("bf16", launch.inner, TILE_ROWS),
        "right": _block("bf16", launch.inner, launch.columns),
        "out": _block("bf16", 1, TILE_ROWS, launch.columns),
        "offsets_ptr": "*i32",
        "ends_ptr": "*i32",
        "left_width": "i32",
        "right_width": "i32",
        "experts": "i32",
    }
    constants = {"BM": TILE_ROWS, "BN": launch.columns}
    return _product(product, tiles.weight_grad_kernel, types, constants, launch)


def _product(
    name: str, function: Any, types: dict[str, str], constants: dict[str, Any], launch: Launch
) -> Kernel:
    constants = {"BK": launch.inner, "GROUP": launch.group, "PROGRAMS": 132} | constants
    label = f"{name} ({launch.columns}, {launch.stages} stages, group {launch.group}"
    label += ", halves)" if launch.halves else ")"
    return Kernel(label, function, types, constants, True, warps=launch.warps, stages=launch.stages)


def _movers() -> Iterator[Kernel]:
    """The kernels of the expert MLP that only move and add."""
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
    )
    rows = {"inverse_ptr": "*i32", "out_ptr": "*bf16", "width": "i32"}
    yield Kernel(
        "scatter",
        tiles.scatter_kernel,
        {"x_ptr": "*bf16", "offsets_ptr": "*i32", "ends_ptr": "*i32", "tokens": "i32", **rows},
        {"SLOTS": 8, "TILE": TILE_ROWS, "CLEARED": CLEARED_ROWS, "BLOCK": 2048},
    )
    for weighted in (True, False):
        yield Kernel(
            f"sum of slots, {'weighted' if weighted else 'plain'}",
            tiles.sum_slots_kernel,
            {"rows_ptr": "*bf16", "weight_ptr": "*fp32" if weighted else "*bf16", **rows},
            {"SLOTS": 8, "WEIGHTED": weighted, "BLOCK": 2048},
        )
    found = {"inverse_ptr": "*i32", "out_ptr": "*fp32", "assignments": "i32"}
    yield Kernel("spread", tiles.spread_kernel, {"values_ptr": "*fp32", **found}, {"BLOCK": 1024})
    for parts in (1, 4, 6, 8):
        yield Kernel(
            f"gather of sums of {parts}",
            tiles.gather_sums_kernel,
            {"parts_ptr": "*fp32", **found},
            {"PARTS": parts, "BLOCK": 1024},
        )


def _plans() -> Iterator[Kernel]:
    """The three kernels that plan the rows."""
    sizes = {"BLOCK": 128, "EXPERTS": 128}
    counted = {"assignments": "i32", "experts": "i32"}
    yield Kernel(
        "plan, count",
        plan.count_kernel,
        {"ids_ptr": "*i64", "counts_ptr": "*i32", **counted},
        sizes,
    )
    yield Kernel(
        "plan, scan",
        plan.scan_kernel,
        {"counts_ptr": "*i32", "totals_ptr": "*i32", "blocks": "i32"},
        {"EXPERTS": 128, "CHUNK": 1024},
    )
    names = ("before", "totals", *RowPlan._fields)
    pointers = {f"{name.split('_')[0]}_ptr": "*i32" for name in names} | {"tile_expert_ptr": "*i32"}
    for rows in (TILE_ROWS, 1):
        yield Kernel(
            f"plan, place in tiles of {rows}",
            plan.place_kernel,
            {"ids_ptr": "*i64", **pointers, **counted, "slots": "i32"},
            {"TILE": rows, **sizes},
        )


def _router() -> Iterator[Kernel]:
    """The kernels of the router, for 128 experts."""
    yield Kernel(
        "router, split of the weight",
        router.split_kernel,
        {"weight_ptr": "*fp32", "parts_ptr": "*bf16", "size": "i32"},
        {"HIGHS": 2, "BLOCK": 1024},
    )
    for sigmoid, renormalise in itertools.product((True, False), repeat=2):
        yield from _router_scores(sigmoid, renormalise)
    for launch in (NARROW_GRAD, WIDE_GRAD):
        yield Kernel(
            f"router, gradient of the weight ({launch.experts})",
            router.weight_grad_kernel,
            {
                "x_ptr": "*bf16",
                "grads_ptr": "*bf16",
                "valid_ptr": "*i1",
                "out_ptr": "*fp32",
                **dict.fromkeys(("tokens", "width", "experts", "plane", "piece"), "i32"),
            },
            {"BT": launch.tokens, "BH": GRAD_COLUMNS, "BE": launch.experts},
            multiplies=True,
            copies=False,
            warps=launch.warps,
        )


def _router_scores(sigmoid: bool, renormalise: bool) -> Iterator[Kernel]:
    score = ("sigmoid" if sigmoid else "softmax") + ("" if renormalise else " as it is")
    shared = {
        "ids_ptr": "*i64",
        **dict.fromkeys(("weights_ptr", "share_ptr"), "*fp32"),
        "valid_ptr": "*i1",
        "scale": "fp32",
    }
    logits = {"logits_ptr": "*fp32"}
    no_logits = {"logits_ptr": None} if sigmoid or renormalise else {}
    choices = {"SIGMOID": sigmoid, "RENORMALISE": renormalise, "SLOTS": 8, "BLOCK": 32}
    yield Kernel(
        f"router, choice by {score}",
        router.choose_kernel,
        {
            **dict.fromkeys(("products_ptr", "bias_ptr"), "*fp32"),
            "counts_ptr": "*i64",
            **dict.fromkeys(("tokens", "experts", "plane", "groups", "group_size"), "i32"),
            **shared,
            **logits,
        },
        {
            **choices,
            "PARTS": PARTS,
            "BIASED": True,
            "SLOTS_2": 8,
            "TOP_GROUPS": 4,
            "GROUPS_2": 8,
            "SIZE_2": 16,
            "LIMITED": True,
        },
    )
    yield Kernel(
        f"router, gradient of {score}",
        router.logits_grad_kernel,
        {
            **dict.fromkeys(("grad_weights_ptr", "grad_logits_ptr"), "*fp32"),
            "out_ptr": "*bf16",
            **dict.fromkeys(("tokens", "experts", "plane"), "i32"),
            **shared,
            **({} if no_logits else logits),
        },
        {
            **choices,
            **no_logits,
            "BLOCK": 16,
            "FROM_WEIGHTS": True,
            "FROM_LOGITS": True,
            "ROWS": 128,
        },
    )


def _exchange() -> Iterator[Kernel]:
    """The kernels that move rows between ranks."""
    tile, block = p2p.TILE_BYTES // 8192, 4096
    numbers = ("tokens", "width", "slots", "experts", "experts_local", "me", "ranks", "tokens_max")
    offsets = ("rows_at", "ids_at", "weights_at", "values_at", "counts_at", "flags_at")
    shared = {
        **dict.fromkeys((*numbers, "blocks", "row_bytes", "area", "putters", "signals"), "i32"),
        **dict.fromkeys((*offsets, "deadline_ns", "staging"), "i64"),
        **dict.fromkeys(
            ("bases_ptr", "epoch_ptr", "rows_ptr", "report_ptr", "wait_ns_ptr"), "*i64"
        ),
        **dict.fromkeys(("rows_sent_ptr", "bytes_sent_ptr", "assignments_ptr"), "*i64"),
        **dict.fromkeys(("expected_ptr", "clock_ptr", "counts_area_ptr"), "*i64"),
        **dict.fromkeys(("done_ptr", "failed_ptr", "slot_ptr", "ids_area_ptr"), "*i32"),
        **dict.fromkeys(("chunks_done_ptr", "ticket_ptr"), "*i32"),
        **dict.fromkeys(("weights_ptr", "weights_area_ptr", "values_ptr"), "*fp32"),
        **dict.fromkeys(("x_ptr", "out_ptr"), "*bf16"),
        "values_out_ptr": "*fp32",
    }
    planned = {"SLOTS": 8, "BLOCK": PLANNED_TOKENS}
    ids = {"ids_ptr": "*i64", "counts_ptr": "*i32"}
    yield Kernel("exchange, count", rdep.count_kernel, shared | ids, planned)
    placed = {**planned, "BLOCKS": 64}
    yield Kernel("exchange, place", rdep.place_kernel, shared | ids, placed)
    back = shared | {"rows_ptr": "*bf16", "counts_ptr": "*i64"}
    met = {"RANKS": 8, "AREAS": AREAS}
    returned = met | {"CHUNKS": MOST_CHUNKS, "SUMMED": p2p.SUMMED // block}
    for with_slots in (True, False):
        more = f"rows{' and slots' if with_slots else ''}"
        moved = {"WITH_SLOTS": with_slots, "SLOTS": 8, "TILE": tile, "BLOCK": block}
        warps = p2p.WARPS
        for staged in (False, True):
            label = f"exchange, {'staging' if staged else 'put'} of {more}"
            put = {**moved, "STAGED": staged}
            yield Kernel(label, rdep.put_kernel, shared | ids, put, warps=warps)
        label = f"exchange, staging of returned {more}"
        yield Kernel(label, rdep.stage_kernel, back, moved, warps=warps)
        label = f"exchange, combine of {more}"
        yield Kernel(label, rdep.combine_kernel, back, moved | returned, warps=warps)
    yield Kernel("exchange, wait", rdep.meet_kernel, shared, met, warps=1)
    opened = shared | {"ids_ptr": "*i32", "counts_ptr": "*i64"}
    yield Kernel("exchange, open", rdep.open_kernel, opened, {"SLOTS": 8, "TILE": 128})


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
    if kernel.multiplies and kernel.copies and not finding.bulk_copies:
        finding.broken.append("no bulk tensor copy")
    return finding


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory that are used, of a thread of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, instructions = (
            subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, listing, file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for listing in ("--dump-resource-usage", "--dump-sass")
        )
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    # A frame may be set up that no instruction reads or writes.
    touched = re.search(r"\b(STL|LDL)\b", instructions) is not None
    return used["REG"], (used["STACK"] + used["LOCAL"]) * touched


def _signature(kernel: Kernel) -> dict[str, str]:
    names = kernel.function.arg_names
    return {name: "constexpr" if name in kernel.constants else kernel.types[name] for name in names}


def _alignment(kernel: Kernel) -> dict[tuple[int], list[list[Any]]]:
    """Pointers and sizes are multiples of 16 where the kernels are launched on real shapes."""
    names = kernel.function.arg_names
    aligned = (
        number
        for number, name in enumerate(names)
        if kernel.types.get(name, "").startswith("*") or name.endswith(ROUND)
    )
    return {(number,): [["tt.divisibility", 16]] for number in aligned}


def _block(dtype: str, *shape: int) -> str:
    """Type of a descriptor with this block."""
    return f"tensordesc<{dtype}[{','.join(map(str, shape))}]>"
