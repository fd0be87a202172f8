"""Small k: a sample of a row bounds its k largest, a pass lists what is above the bound, a search ends the list.

    bound  one program a row, where programs are many; of few, each finds the same bound itself, which saves a launch
    list   what each program's part of a row has above the bound
    emit   finds the k-th largest of the list and writes the k; each program searches the whole list, which is short,
           and writes its share

Only speed depends on the sample: where a list does not hold the k first, emit reads the row itself.
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


def _begin(problem) -> Parameters:
    """The row's values and window, and its bound."""
    p = Parameters().add(pointer(problem.dtype, problem.aligned), "x")
    return p.window("", problem.starts, problem.lengths).add("*i64", "bounds")


def _listed(p: Parameters, problem) -> Parameters:
    p.add("*i32", "counts", "ties")
    return p.add(pointer(problem.dtype, True), "list_value").add(pointer("i32", True), "list_column")


def _sample(problem, config) -> dict:
    constants = {"UNIT": unit(problem.dtype, problem.aligned), "WHOLE": config.short_list}
    return constants | {"GROUPS": config.groups, "MEMBERS": config.members}


def _build_bound(problem, config):
    p = _begin(problem).add("i64", "x_row").add("i32", "k", "columns")
    return Build(bound_kernel, p.types, p.constants | _sample(problem, config), num_warps=config.short_warps)


def _build_list(problem, config):
    p = _listed(_begin(problem), problem).add("i64", "x_row")
    p.add("i32", "k", "columns", "programs", "chunk", "capacity")
    constants = _sample(problem, config) | {"OWN": config.own, "TILE": config.short_tile, "PDL": config.pdl}
    # Three programs on a multiprocessor; that which looks for the bound takes more.
    registers = None if config.own else 80
    return Build(list_kernel, p.types, p.constants | constants, num_warps=config.short_warps, maxnreg=registers)


def _build_emit(problem, config):
    p = add_results(_listed(_begin(problem), problem), problem).add("i32", "programs", "parts", "capacity")
    constants = {"LAST": problem.last, "UNIT": unit(problem.dtype, problem.aligned)}
    constants |= {"TILE": config.short_list, "SHARE": config.share, "PDL": config.pdl}
    return Build(emit_kernel, p.types, p.constants | constants, num_warps=config.short_list_warps)


launch_bound = Launcher("top_k_bound", _build_bound)
launch_list = Launcher("top_k_list", _build_list)
launch_emit = Launcher("top_k_emit_list", _build_emit)
LAUNCHERS = (launch_bound, launch_list, launch_emit)


def kernels(problem, config):
    """(launcher, problem, config) of each kernel."""
    for own in (False, True):
        yield launch_list, _listing(problem), _owning(config, own)
    yield launch_bound, _listing(problem), _owning(config, False)
    for parts in (1, int(PARTS)):
        yield launch_emit, problem, _sharing(config, parts)


@cache
def _listing(problem):
    """What a list depends on: not what is written of it."""
    p = problem
    return TopK("values", p.dtype, starts=p.starts, lengths=p.lengths, aligned=p.aligned)


@cache
def _owning(config, own: bool):
    """The list's, where each program finds the bound itself, or does not."""
    # Where programs are many, those of the next kernel would take their room: 64 x 65536 took 36.3 us, not 34.0 (H100).
    return replace(config, own=own, pdl=config.early and own)


@cache
def _sharing(config, parts: int):
    """Emit's: of a share that is a small part of the list one element a thread, else four."""
    few = config.short_list_warps * 32 if parts >= 8 else config.short_list // 4
    return replace(config, share=few, pdl=config.early)


def share(rows: int, columns: int, config, device: torch.device) -> tuple[int, int, int]:
    """Programs that list a row, tiles of each, and programs that emit it."""
    tiles, sms = triton.cdiv(columns, config.short_tile), target_of(device).sms
    chunk = triton.cdiv(tiles, min(max(8 * sms // rows, 1), int(PARTS)))
    # Every program of emit searches the whole list: enough of them to fill the chip once, and no more.
    return triton.cdiv(tiles, chunk), chunk, min(max(sms // rows, 1), int(PARTS))


def run(problem, config, x, k, window, results: Results):
    """Launch it. `window` are starts and lengths."""
    rows, columns = x.shape
    programs, chunk, parts = share(rows, columns, config, x.device)
    # A list longer than emit has registers for takes it several times as long.
    capacity = min(chunk * config.short_tile, 2 * config.short_list)
    own = rows * programs <= 2 * target_of(x.device).sms

    def scratch(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=x.device)

    bounds, counts, ties = scratch(rows, dtype=torch.int64), scratch(rows, programs), scratch(rows, programs)
    list_value, list_column = scratch(rows, programs, capacity, dtype=x.dtype), scratch(rows, programs, capacity)
    given, listed, x_row = (x, *window, bounds), (counts, ties, list_value, list_column), x.stride(0)
    listing = _listing(problem)
    if not own:
        start(launch_bound, listing, _owning(config, False), (rows, 1, 1), *given, x_row, k, columns)
    start(launch_list, listing, _owning(config, own), (rows, programs, 1), *given, *listed, x_row, k, columns,
          programs, chunk, capacity)  # fmt: skip
    start(launch_emit, problem, _sharing(config, parts), (rows, parts, 1), *given, *listed, *results.arguments(x, k),
          programs, parts, capacity)  # fmt: skip
