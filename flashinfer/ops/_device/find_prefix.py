"""Launches the four stages of `prefix`: compile keys, scratch memory, and how many programs share a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops._device import prefix
from flashinfer.ops._device.prefix_bracket import bracket_kernel, scan_kernel
from flashinfer.ops._device.prefix_gather import gather_kernel
from flashinfer.ops._device.prefix_resolve import resolve_kernel
from flashinfer.ops._device.rows import pointer, unit

_DOMAINS = {"scores": prefix.SCORES, "probs": prefix.PROBS, "logits": prefix.LOGITS}


@dataclass(frozen=True)
class Stages:
    """The compile key of the stages. Each stage is compiled for the fields that it depends on.

    Attributes
    ----------
    domain, dtype : str
        "scores", "probs" or "logits", and their dtype.
    aligned : bool
        Rows can be read 16 bytes at a time.
    top_k, top_p : str
        Dtype of the filter's tensor, "scalar", or "" where it is not applied.
    top_k_first : bool
        p is a share of the sum of the first k elements, not of the whole row.
    statistics, mass, race, places : bool
        statistics: the row's largest value and sum are computed, and a row that is no distribution has an empty prefix.
        mass: the prefix is summed. race: a token is drawn from it. places: positions in an output are computed.
    last, ties : bool
        last: of equal elements the last come first. ties: elements equal to the last of the prefix are in it, too.
    seed, offset : int
        SCALAR, SHARED or PER_ROW of `philox`.
    indices : str
        Dtype of the tensor that maps rows of the output to rows of the input, or "".
    starts, lengths : bool
        Rows are windows of the input's rows.
    out : str
        Dtype of the tokens.
    """

    domain: str
    dtype: str
    aligned: bool
    top_k: str = ""
    top_p: str = ""
    top_k_first: bool = False
    statistics: bool = False
    mass: bool = False
    race: bool = False
    places: bool = False
    last: bool = False
    ties: bool = False
    seed: int = 0
    offset: int = 0
    indices: str = ""
    starts: bool = False
    lengths: bool = False
    out: str = "i32"


@dataclass(frozen=True)
class Filters:
    """The filters of one call. k or ks, p or ps: a scalar, or a tensor with an element for each row of the output. An
    absent argument is None."""

    k: int | None = None
    ks: torch.Tensor | None = None
    p: float | None = None
    ps: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    randomness: tuple = (None, None, None, None)


@dataclass(frozen=True)
class Found:
    """What the stages computed, for the kernel that writes the output: tensors as `prefix` describes them."""

    maxima: torch.Tensor
    candidates: torch.Tensor | None
    state: torch.Tensor
    numbers: torch.Tensor
    listed: torch.Tensor
    list_value: torch.Tensor
    list_column: torch.Tensor
    part_count: torch.Tensor
    programs: int
    chunk: int
    tiles: int


def share(rows: int, columns: int, tile: int, device: torch.device) -> tuple[int, int, int]:
    """Programs of a row, tiles of a program, and tiles of a row: as many programs as fill the chip."""
    tiles = -(-columns // tile)
    # A multiprocessor holds eight programs of 256 threads: top-k and top-p of 64 x 128256 take 135 us with eight,
    # 143 with four, 151 with two (H100). The stages reduce at most BINS programs of a row in one step.
    wanted = min(max(8 * target_of(device).sms // max(rows, 1), 1), int(prefix.BINS))
    chunk = -(-tiles // wanted)
    return -(-tiles // chunk), chunk, tiles


def share_candidates(stages: Stages, config, rows: int, columns: int, k: int | None, programs: int, sms: int) -> int:
    """Programs of a row in gather, at most `programs`. Where group maxima bound k in all rows (`groups_bound_k`), the
    programs read about k + k / 8 candidate groups; there are as many as read a tile each, or as are resident."""
    if k is None or stages.starts or stages.lengths or stages.places or k > -(-columns // config.group) // 4:
        return programs
    read = -(-(k + k // 8) * config.group // candidate_tile_of(config)["CANDIDATE_TILE"])
    # The registers of a multiprocessor hold two programs.
    return min(programs, max(read, 2 * sms // max(rows, 1), 1))


def find_prefix(stages: Stages, config, x, rows: int, filters: Filters, samples=None, valid=None) -> Found:
    """Launch the stages for the prefixes of `rows` rows of x [rows of the input, columns].

    With `race`, the tokens and whether the row is a distribution go to samples [rows] and valid (int8 [rows]).
    """
    columns, device = x.shape[1], x.device
    programs, chunk, tiles = share(rows, columns, config.tile, device)
    # Few elements are listed in most rows. In a flat row they are an eighth, the width of a bin; in a row that rises
    # steadily up to 9/32, the share of groups that reach the key. Where a list overflows, by ties or by values closer
    # than a bin, resolve reads the row itself.
    capacity = max(columns // 32 * 9, min(columns, 4096))

    def scratch(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=device)

    maxima = scratch(rows, tiles, config.tile // config.group)
    candidates = torch.empty_like(maxima) if stages.top_k else None
    counts, listed = scratch(rows, programs, int(prefix.BINS)), scratch(rows)
    tile_top, tile_sum = (scratch(rows, tiles, dtype=torch.float32) for _ in range(2))
    state = scratch(rows, int(prefix.STATE), dtype=torch.int64)
    numbers = scratch(rows, int(prefix.NUMBERS), dtype=torch.float32)
    list_value, list_column = scratch(rows, capacity, dtype=torch.float32), scratch(rows, capacity)
    gather_programs = share_candidates(stages, config, rows, columns, filters.k, programs, target_of(device).sms)
    part_count, part_column = scratch(rows, gather_programs), scratch(rows, gather_programs)
    part_mass = scratch(rows, gather_programs, dtype=torch.int64)
    part_score = scratch(rows, gather_programs, dtype=torch.float32)
    f, randomness = filters, filters.randomness if stages.race else (None, None, None, None)
    window, x_row = (f.indices, f.starts, f.lengths), x.stride(0)
    grid, gather_grid, row_grid = (rows * programs, 1, 1), (rows * gather_programs, 1, 1), (rows, 1, 1)
    parts = part_count, part_mass, part_score, part_column
    start(launch_scan, scan_stage(stages), config, grid, x, *window, f.k, f.ks, maxima, counts, tile_top,
          tile_sum, x_row, columns, programs, chunk, tiles)  # fmt: skip
    start(launch_bracket, bracket_stage(stages), config, row_grid, maxima, candidates, counts, tile_top, tile_sum,
          f.starts, f.lengths, f.k, f.ks, f.p, f.ps, state, numbers, listed, columns, programs, tiles)  # fmt: skip
    start(launch_gather, gather_stage(stages), config, gather_grid, x, *window, maxima, candidates, state, numbers,
          listed, list_value, list_column, *parts, *randomness, x_row, columns, gather_programs, chunk, tiles,
          capacity)  # fmt: skip
    start(launch_resolve, stages, config, row_grid, x, *window, state, numbers, listed, list_value, list_column,
          *parts, f.k, f.ks, f.p, f.ps, *randomness, samples, valid, x_row, columns, gather_programs, chunk,
          capacity)  # fmt: skip
    listing = candidates, state, numbers, listed, list_value, list_column
    return Found(maxima, *listing, part_count, programs, chunk, tiles)


def start(launcher: Launcher, problem, config, grid, *args) -> None:
    """Launch without the arguments that are None: the kernel is compiled without a parameter for them."""
    launcher(problem, config, grid, *(arg for arg in args if arg is not None))


@cache
def scan_stage(s: Stages) -> Stages:
    kept = {name: getattr(s, name) for name in ("top_k", "statistics", "indices", "starts", "lengths")}
    return Stages(s.domain, s.dtype, s.aligned, **kept)


@cache
def bracket_stage(s: Stages) -> Stages:
    kept = {name: getattr(s, name) for name in ("top_k", "top_p", "top_k_first", "statistics", "starts", "lengths")}
    return Stages(s.domain, "fp32", False, **kept)


@cache
def gather_stage(s: Stages) -> Stages:
    # Gather does not read k: its dtype is not part of the key.
    top_k = "scalar" if s.top_k else ""
    return replace(s, top_k=top_k, top_p="", top_k_first=False, statistics=False, places=False, last=False, out="i32")


def stages_to_compile(s: Stages, config):
    """(launcher, problem, config) of each stage."""
    yield launch_scan, scan_stage(s), config
    yield launch_bracket, bracket_stage(s), config
    yield launch_gather, gather_stage(s), config
    yield launch_resolve, s, config


class Parameters:
    """The run-time parameters of a kernel in its order (`types`), with None for those that a call lacks."""

    def __init__(self):
        self.types: dict[str, str | None] = {}

    def add(self, kind: str, *names: str, present: bool = True) -> Parameters:
        self.types.update(dict.fromkeys(names, kind if present else None))
        return self

    def window(self, indices: str = "", starts: bool = False, lengths: bool = False) -> Parameters:
        self.add(f"*{indices}", "window.indices", present=bool(indices))
        return self.add("*i32", "window.starts", present=starts).add("*i32", "window.lengths", present=lengths)

    def filter(self, name: str, scalar: str, kind: str) -> Parameters:
        self.add(scalar, name, present=kind == "scalar")
        return self.add(f"*{kind}", f"{name}s", present=kind not in ("", "scalar"))

    def filters(self, s) -> Parameters:
        return self.filter("filters.top_k", "i32", s.top_k).filter("filters.top_p", "fp32", s.top_p)

    def randomness(self, seed: int, offset: int, present: bool = True) -> Parameters:
        for name, where in (("seed", seed), ("offset", offset)):
            self.add("i64", f"random.{name}", present=present and where == 0)
            self.add("*i64", f"random.{name}s", present=present and where != 0)
        return self


def constants_of(s: Stages) -> dict:
    return {"DOMAIN": _DOMAINS[s.domain], "UNIT": unit(s.dtype, s.aligned)}


def groups_of(config) -> dict:
    return {"TILE": config.tile, "GROUP": config.group}


def candidate_tile_of(config) -> dict:
    """Elements of candidate groups that a program reads at once: half a tile, so that few groups occupy more
    programs."""
    return {"CANDIDATE_TILE": max(config.tile // 2, config.group)}


def rows_pointer(s) -> str:
    return pointer(s.dtype, s.aligned)


def build_scan(s: Stages, config) -> Build:
    p = Parameters().add(rows_pointer(s), "x").window(s.indices, s.starts, s.lengths)
    p.filters(s).add("*i32", "maxima", "counts").add("*fp32", "tile_top", "tile_sum")
    p.add("i64", "x_row").add("i32", "columns", "programs", "chunk", "tiles")
    constants = constants_of(s) | groups_of(config)
    constants |= {"TOP_K": bool(s.top_k), "STATISTICS": s.statistics}
    return Build(scan_kernel, p.types, constants, num_warps=config.num_warps)


def build_bracket(s: Stages, config) -> Build:
    p = Parameters().add("*i32", "maxima").add("*i32", "candidates", present=bool(s.top_k)).add("*i32", "counts")
    p.add("*fp32", "tile_top", "tile_sum")
    p.window("", s.starts, s.lengths).filters(s)
    p.add("*i64", "state").add("*fp32", "numbers").add("*i32", "listed").add("i32", "columns", "programs", "tiles")
    constants = groups_of(config) | {
        "DOMAIN": _DOMAINS[s.domain],
        "STATISTICS": s.statistics,
        "TOP_K": bool(s.top_k),
        "TOP_P": bool(s.top_p),
        "TOP_K_FIRST": s.top_k_first,
        "BLOCK": config.group_tile,
        "WAYS": config.ways,
        "PDL": config.early,
    }  # fmt: skip
    return Build(bracket_kernel, p.types, constants, num_warps=config.group_warps)


def _between(p: Parameters) -> Parameters:
    """The parameters of scratch memory: row states, row lists, and the partial results of programs."""
    p.add("*i64", "state").add("*fp32", "numbers").add("*i32", "lists.count").add("*fp32", "lists.value")
    p.add("*i32", "lists.column", "parts.count").add("*i64", "parts.mass").add("*fp32", "parts.score")
    return p.add("*i32", "parts.column")


def build_gather(s: Stages, config) -> Build:
    p = Parameters().add(rows_pointer(s), "x").window(s.indices, s.starts, s.lengths).add("*i32", "maxima")
    _between(p.add("*i32", "candidates", present=bool(s.top_k)))
    p.randomness(s.seed, s.offset, s.race)
    p.add("i64", "x_row").add("i32", "columns", "programs", "chunk", "tiles", "capacity")
    constants = constants_of(s) | groups_of(config) | candidate_tile_of(config)
    constants |= {"TOP_K": bool(s.top_k), "MASS": s.mass, "RACE": s.race, "SEED": s.seed, "OFFSET": s.offset}
    constants |= {"PDL": config.early}
    return Build(gather_kernel, p.types, constants, num_warps=config.num_warps)


def build_resolve(s: Stages, config) -> Build:
    p = _between(Parameters().add(rows_pointer(s), "x").window(s.indices, s.starts, s.lengths))
    p.filters(s).randomness(s.seed, s.offset, s.race)
    p.add(f"*{s.out}", "samples", present=s.race).add("*i8", "valid", present=s.race)
    p.add("i64", "x_row").add("i32", "columns", "programs", "chunk", "capacity")
    constants = constants_of(s) | {
        "TOP_K": bool(s.top_k),
        "TOP_P": bool(s.top_p),
        "TOP_K_FIRST": s.top_k_first,
        "MASS": s.mass,
        "RACE": s.race,
        "PLACES": s.places,
        "LAST": None if s.ties else s.last,
        "SEED": s.seed,
        "OFFSET": s.offset,
        "CHUNK": config.tile,
        "TILE": config.list_tile,
        "WAYS": config.ways,
        "PDL": config.early,
    }  # fmt: skip
    # With one program a row registers are plentiful, but ptxas would keep to 96 and spill. A thread has at most 255, a
    # multiprocessor 65536.
    registers = min(255, 65536 // (32 * config.list_warps))
    return Build(resolve_kernel, p.types, constants, num_warps=config.list_warps, maxnreg=registers)


launch_scan = Launcher("prefix_scan", build_scan)
launch_bracket = Launcher("prefix_bracket", build_bracket)
launch_gather = Launcher("prefix_gather", build_gather)
launch_resolve = Launcher("prefix_resolve", build_resolve)
LAUNCHERS = (launch_scan, launch_bracket, launch_gather, launch_resolve)
