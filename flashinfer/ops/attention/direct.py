"""Batches that are run without a plan of the caller's: each call plans on the device, and attends."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache, partial

import torch

from flashinfer._core import env, replay, workspace
from flashinfer._core.direct_replay import DirectRecording
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.attention.kernels import Kernels, kernels_of
from flashinfer.ops.attention.mla.operands import Factors, attend
from flashinfer.ops.attention.options import PlanOptions, tile_rows
from flashinfer.ops.attention.plan import Plan
from flashinfer.ops.attention.problem import alibi_slopes
from flashinfer.ops.attention.split import Limits
from flashinfer.ops.attention.tables import Table

# Plans kept per thread: an engine's kinds (prefill, decode, with and without a window) on its streams.
_MOST_KEPT = 64
# Tensors of one value. None is dropped: captured graphs read them.
_MOST_CONSTANTS = 64
_constants: dict[tuple[int, int, torch.device], torch.Tensor] = {}

_kept = threading.local()


def run_direct(asked: PlanOptions, table: Table, q: torch.Tensor, kv, views, *, kv_tokens: int, longest_q: int = 0,
               backend: str = "auto", **call):  # fmt: skip
    """Attention of a batch that only the device knows. Nothing waits for it, so that a CUDA graph can capture it.

    Work lists and partial results are kept per thread and stream, and serve every call there whose batch fits; in a
    captured stream they are allocated in the graph's pool.

    Parameters
    ----------
    asked : PlanOptions
        Checked.
    table : Table
        On q's device; read at every call, and by a captured graph at every replay.
    q : Tensor [rows, num_qo_heads, head_dim_qk]
    kv, views
        As Plan.run takes them.
    kv_tokens : int
        A bound on the keys of all requests.
    longest_q : int
        The longest query, or about: what tiles are chosen by. 0 where it is unknown.
    backend : str
    call
        The other arguments of Plan.run.

    Returns
    -------
    out, or (out, lse) with return_lse
    """
    device = q.device
    if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return run_direct(asked, table, q, kv, views, kv_tokens=kv_tokens, longest_q=longest_q, backend=backend,
                              **call)  # fmt: skip
    rows = tile_rows(table.q_len or longest_q, asked.group)
    plan = _plan_of(kernels_of(asked, rows, table.mask is not None, device, backend))
    plan.fill(table, Limits(table.batch_size, q.shape[0], kv_tokens))
    if replay.recording() is not None:
        plan.bind_again()
    return plan.run(q, kv, views, **call)


def run_latent(asked: PlanOptions, table: Table, q_nope, q_pe, ckv, kpe, factors: Factors, *, longest_q: int = 1,
               given: torch.Tensor | None = None, backend: str = "auto", **call
               ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same for latent attention.

    Parameters
    ----------
    asked, table, longest_q, backend
        As of `run_direct`.
    q_nope, q_pe, ckv, kpe, factors
        As `mla.operands.attend` takes them.
    given : uint8 Tensor, optional
        A caller's workspace for partial results, used where it is large enough and on the queries' device.
    call
        The other arguments of `attend`.
    """
    device = q_nope.device
    if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return run_latent(asked, table, q_nope, q_pe, ckv, kpe, factors, longest_q=longest_q, given=given,
                              backend=backend, **call)  # fmt: skip
    plan = _plan_of(kernels_of(asked, tile_rows(max(longest_q, 1), asked.group), False, device, backend), given)
    rows = table.batch_size * table.q_len if table.q_len else q_nope.shape[0]
    keys = table.kv_indices.shape[0] * (1 if asked.sparse else asked.page_size)
    plan.fill(table, Limits(table.batch_size, rows, keys, each_kv=table.each_kv))
    if replay.recording() is not None:
        plan.bind_again()
    return attend(plan, q_nope, q_pe, ckv, kpe, factors, **call)


def _plan_of(kernels: Kernels, given: torch.Tensor | None = None) -> Plan:
    """The plan that this thread keeps for the current stream, with partial results in `given` where it is large enough;
    a new one in a captured stream."""
    device, stream, debug = kernels.device, None, env.DEBUG.is_on()
    if given is not None and not (given.device == device and given.is_contiguous() and given.data_ptr() % 16 == 0):
        given = None
    alibi = kernels.options.pos_encoding_mode == "ALIBI"
    slopes = _slopes(kernels.options.num_qo_heads, device) if alibi else None
    scratch = partial(workspace.take, device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            scratch = partial(torch.empty, dtype=torch.uint8, device=device)
            scratch = scratch if given is None else partial(_scratch, given, scratch)
            return Plan(kernels, scratch, slopes, debug, direct=True)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    plans = _kept.__dict__.setdefault("plans", OrderedDict())
    key = kernels, stream, debug, None if given is None else (given.data_ptr(), given.nbytes)
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= _MOST_KEPT:
            plans.popitem(last=False)
        scratch = scratch if given is None else partial(_scratch, given, scratch)
        plan = plans[key] = Plan(kernels, scratch, slopes, debug, direct=True)
    return plan


def _scratch(given: torch.Tensor, own, count: int) -> torch.Tensor:
    if given.nbytes >= count:
        return given.view(-1).view(torch.uint8)[:count]
    return own(count)


@lru_cache(maxsize=64)
def _slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    # From the host: this waits until they are there, so that work on any stream finds them.
    return torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)


def ones_times(value: int, count: int, device: torch.device) -> torch.Tensor:
    """int32 [count] of one value, kept for other counts too."""
    key = value, power_of_two(count), device
    if key not in _constants:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or len(_constants) >= _MOST_CONSTANTS:
            return torch.full((count,), value, dtype=torch.int32, device=device)
        # From the host: this waits until it is there, so that work on any stream finds it.
        ones = torch.tensor([value], dtype=torch.int32, device="cpu")
        _constants[key] = ones.expand(key[1]).contiguous().to(device)
    found = _constants[key][:count]
    recorded = replay.recording()
    if isinstance(recorded, DirectRecording):
        recorded.constants.append(found)
    return found
