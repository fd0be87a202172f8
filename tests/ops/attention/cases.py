"""Running one batch through the public wrappers, and comparing it with the oracle."""

import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.attention import oracle


def backends(device):
    """What the suite on this device runs: on a CPU the reference, and the kernels under Triton's interpreter.

    On a GPU: the kernels made for this chip, and the portable one.
    """
    return ("auto", "portable") if device.type == "cuda" else ("reference", "portable")


def workspace(device, count=1 << 22):
    return torch.empty(count, dtype=torch.uint8, device=device)


def check(result, ragged, options, extras=None, o_dtype=None, terms=0.0):
    """Assert out and base-2 lse of `result` against float64, by the rule of testing/compare.py, whose `terms` are those
    of out."""
    out, lse = result
    truth, truth_lse = oracle.batch(ragged, options, torch.float64, extras)
    o_dtype = o_dtype or out.dtype
    compute = o_dtype if o_dtype == torch.float32 or ragged.q.dtype == o_dtype else torch.float16
    same, rounded_lse = oracle.batch(ragged, options, compute, extras)
    _, same_lse = oracle.batch(ragged, options, torch.float32, extras)
    if options.pos_encoding_mode == "ROPE_LLAMA":
        # Rotated q and k are rounded to the type that they are multiplied in, and the logits with them.
        same_lse = rounded_lse.float()
    assert_close(out, same.to(out.dtype), truth, "out", terms=terms)
    assert_close(lse, same_lse, truth_lse, "lse", terms=largest_logit(ragged, options, extras))


def largest_logit(ragged, options, extras=None):
    """A bound of |q k| and of what is added to it, in base 2; NaN and infinite rows left out."""
    extras = extras or oracle.Extras()
    if not ragged.q.numel() or not ragged.k.numel():
        return 0.0
    by_norm, by_element = (
        float(size(ragged.q.double()).nan_to_num(0, 0, 0).max() * size(ragged.k.double()).nan_to_num(0, 0, 0).max())
        for size in (lambda x: x.norm(dim=-1), torch.abs)
    )
    scale = abs(options.sm_scale if options.sm_scale is not None else ragged.q.shape[2] ** -0.5)
    scale *= abs(extras.q_scale * extras.k_scale)
    top = by_norm * scale
    if options.pos_encoding_mode == "ALIBI":
        top += int(ragged.kv_indptr.diff().max())
    if options.logits_soft_cap:
        # A cap bounds a logit, and not the products of elements that cancel behind it.
        top = min(top, max(options.logits_soft_cap, by_element * scale))
    return top * 1.45


def run_ragged(ragged, options, backend, *, mask=None, workspace_bytes=1 << 22, plan=None, run=None, scales=()):
    device = ragged.q.device
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device, workspace_bytes), backend=backend)
    wrapper.plan(
        ragged.qo_indptr, ragged.kv_indptr, ragged.q.shape[1], ragged.k.shape[1], ragged.q.shape[2],
        head_dim_vo=ragged.v.shape[2], custom_mask=mask, q_data_type=ragged.q.dtype, kv_data_type=ragged.k.dtype,
        **options.as_kwargs(), **(plan or {}),
    )  # fmt: skip
    return wrapper.run(ragged.q, ragged.k, ragged.v, *scales, return_lse=True, **(run or {}))


def run_paged(ragged, options, backend, *, page_size=16, kv_layout="NHD", mask=None, plan=None, run=None, paged=None,
              scales=()):  # fmt: skip
    device = ragged.q.device
    paged = paged or generate.paged(ragged, page_size, kv_layout)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout, backend=backend)
    wrapper.plan(
        ragged.qo_indptr, paged.indptr, paged.indices, paged.last_page_len, ragged.q.shape[1], ragged.k.shape[1],
        ragged.q.shape[2], page_size, head_dim_vo=ragged.v.shape[2], custom_mask=mask, q_data_type=ragged.q.dtype,
        kv_data_type=ragged.k.dtype, **options.as_kwargs(), **(plan or {}),
    )  # fmt: skip
    return wrapper.run(ragged.q, paged.kv_cache, *scales, return_lse=True, **(run or {}))


def run_decode(ragged, options, backend, *, page_size=16, kv_layout="NHD", plan=None, run=None, paged=None, scales=()):
    device = ragged.q.device
    paged = paged or generate.paged(ragged, page_size, kv_layout)
    kwargs = options.as_kwargs()
    kwargs.pop("causal")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout, backend=backend)
    wrapper.plan(
        paged.indptr, paged.indices, paged.last_page_len, ragged.q.shape[1], ragged.k.shape[1], ragged.q.shape[2],
        page_size, q_data_type=ragged.q.dtype, kv_data_type=ragged.k.dtype, **kwargs, **(plan or {}),
    )  # fmt: skip
    return wrapper.run(ragged.q, paged.kv_cache, *scales, return_lse=True, **(run or {}))
