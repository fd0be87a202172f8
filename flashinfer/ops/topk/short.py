"""Small k: a sample of a row bounds its k-th largest, a pass lists the elements above it, a search finds the k-th.

    bound  one program a row. With few list programs there is no such launch: each of them computes the same bound
    list   each program lists the elements above the bound in its part of a row
    emit   finds the k-th largest of the list and writes the k largest; each program searches the whole list, which is
           short, and writes its share

For example 2048 of 65536: the sample gives a bound that some 3200 elements exceed, and emit searches these. Only speed
depends on the sample: if a list does not hold the k largest, emit reads the row itself.
"""

from dataclasses import replace
from functools import cache

import torch
import triton

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops._device.find_prefix import Parameters, start
from flashinfer.ops._device.rows import pointer, unit
from flashinfer.ops.topk import TopK
from flashinfer.ops.topk.results import Results, add_results
from flashinfer.ops.topk.short_emit import PARTS, emit_kernel
from flashinfer.ops.topk.short_list import bound_kernel, list_kernel


def _row_parameters(problem) -> Parameters:
    """Parameters of a row's values, window and bound."""
    p = Parameters().add(pointer(problem.dtype, problem.aligned), "x")
    return p.window("", problem.starts, problem.lengths).add("*i64", "bounds")


def _add_list(p: Parameters, problem) -> Parameters:
    """Adds the parameters of a list."""
    p.add("*i32", "counts", "ties")
    return p.add(pointer(problem.dtype, True), "list_value").add(pointer("i32", True), "list_column")


def _sample(problem, config) -> dict:
    constants = {"UNIT": unit(problem.dtype, problem.aligned), "WHOLE": config.short_list}
    return constants | {"GROUPS": config.groups, "MEMBERS": config.members}


def _build_bound(problem, config):
    p = _row_parameters(problem).add("i64", "x_row").add("i32", "k", "columns")
    return Build(bound_kernel, p.types, _sample(problem, config), num_warps=config.short_warps)


def _build_list(problem, config):
    p = _add_list(_row_parameters(problem), problem).add("i64", "x_row")
    p.add("i32", "k", "columns", "programs", "chunk", "capacity")
    constants = _sample(problem, config) | {"FINDS_BOUND": config.finds_bound, "TILE": config.short_tile}
    constants["PDL"] = config.pdl
    # 80 registers allow three programs on a multiprocessor; a program that computes the bound needs more.
    registers = None if config.finds_bound else 80
    return Build(list_kernel, p.types, constants, num_warps=config.short_warps, maxnreg=registers)


def _build_emit(problem, config):
    p = add_results(_add_list(_row_parameters(problem), problem), problem).add("i32", "programs", "parts", "capacity")
    constants = {"LAST": problem.last, "UNIT": unit(problem.dtype, problem.aligned)}
    constants |= {"TILE": config.short_list, "SHARE": config.share, "PDL": config.pdl}
    return Build(emit_kernel, p.types, constants, num_warps=config.short_list_warps)


launch_bound = Launcher("top_k_bound", _build_bound)
launch_list = Launcher("top_k_list", _build_list)
launch_emit = Launcher("top_k_emit_list", _build_emit)
LAUNCHERS = (launch_bound, launch_list, launch_emit)


def kernels(problem, config):
    """(launcher, problem, config) of each kernel."""
    for finds_bound in (False, True):
        yield launch_list, _list_problem(problem), _list_config(config, finds_bound)
    yield launch_bound, _list_problem(problem), _list_config(config, False)
    for parts in (1, int(PARTS)):
        yield launch_emit, problem, _emit_config(config, parts)


@cache
def _list_problem(problem):
    """The part of the problem that a list depends on: form and order of results are left out."""
    p = problem
    return TopK("values", p.dtype, starts=p.starts, lengths=p.lengths, aligned=p.aligned)


@cache
def _list_config(config, finds_bound: bool):
    """The config of the list kernel, which computes the bound itself or not."""
    # With many programs, those of a dependent launch would take their place: 64 x 65536 took 36.3 us, not 34.0 (H100).
    return replace(config, finds_bound=finds_bound, pdl=config.early and finds_bound)


@cache
def _emit_config(config, parts: int):
    """The config of the emit kernel: one element a thread at a time if a share is a small part of the list, else
    four."""
    elements = config.short_list_warps * 32 if parts >= 8 else config.short_list // 4
    return replace(config, share=elements, pdl=config.early)


def share(rows: int, columns: int, config, device: torch.device) -> tuple[int, int, int]:
    """The number of list programs a row, of tiles of each, and of emit programs a row."""
    tiles, sms = triton.cdiv(columns, config.short_tile), target_of(device).sms
    chunk = triton.cdiv(tiles, min(max(8 * sms // rows, 1), int(PARTS)))
    # Every emit program searches the whole list, so there are as many as fill the chip once, and no more.
    return triton.cdiv(tiles, chunk), chunk, min(max(sms // rows, 1), int(PARTS))


def run(problem, config, x, k, window, results: Results):
    """Launch the two or three kernels. `window` are starts and lengths."""
    rows, columns = x.shape
    programs, chunk, parts = share(rows, columns, config, x.device)
    # Emit keeps a list in registers; a longer one takes several times as long.
    capacity = min(chunk * config.short_tile, 2 * config.short_list)
    finds_bound = rows * programs <= 2 * target_of(x.device).sms

    def scratch(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=x.device)

    bounds, counts, ties = scratch(rows, dtype=torch.int64), scratch(rows, programs), scratch(rows, programs)
    list_value, list_column = scratch(rows, programs, capacity, dtype=x.dtype), scratch(rows, programs, capacity)
    row_arguments, list_arguments, x_row = (x, *window, bounds), (counts, ties, list_value, list_column), x.stride(0)
    list_problem = _list_problem(problem)
    if not finds_bound:
        start(launch_bound, list_problem, _list_config(config, False), (rows, 1, 1), *row_arguments, x_row, k, columns)
    start(launch_list, list_problem, _list_config(config, finds_bound), (rows, programs, 1), *row_arguments,
          *list_arguments, x_row, k, columns, programs, chunk, capacity)  # fmt: skip
    start(launch_emit, problem, _emit_config(config, parts), (rows, parts, 1), *row_arguments, *list_arguments,
          *results.arguments(x, k), programs, parts, capacity)  # fmt: skip
