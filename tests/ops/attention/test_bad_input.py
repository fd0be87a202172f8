"""Bad input raises a ValueError that names the argument, before anything is launched."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.target import named
from flashinfer.ops.attention.decode import decode
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import workspace


@pytest.fixture
def x(device):
    return generate.ragged_batch([3, 2], [9, 5], 4, 2, 64, dtype=torch.float16, device=device)


@pytest.fixture
def paged(x):
    return generate.paged(x, 4)


def plan_arguments(x, paged, **changes):
    arguments = dict(
        qo_indptr=x.qo_indptr, paged_kv_indptr=paged.indptr, paged_kv_indices=paged.indices,
        paged_kv_last_page_len=paged.last_page_len, num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, page_size=4,
    )  # fmt: skip
    return arguments | changes


@pytest.mark.parametrize("value", ("a", [1], object()), ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ("q_scale", "k_scale", "v_scale", "window_left", "sinks", "out", "lse"))
def test_arguments_of_a_run_that_are_of_another_kind(name, value, x, paged, device):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(**plan_arguments(x, paged))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}: got "):
            wrapper.run(x.q, paged.kv_cache, **{name: value})
        wrapper.run(x.q, paged.kv_cache)
    with pytest.raises(ValueError, match="^window_left: got 2.5"):
        wrapper.run(x.q, paged.kv_cache, window_left=2.5)


@pytest.mark.parametrize("value", (0, -1.0, float("nan"), float("inf"), "a"), ids=str)
def test_the_scale_of_a_quantised_output_is_positive(value, x, device):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(x.qo_indptr, x.kv_indptr, 4, 2, 64)
    with pytest.raises(ValueError, match="^o_scale: got "):
        wrapper.run(x.q, x.k, x.v, o_scale=value)
    with pytest.raises(ValueError, match="^v_scale: got "):
        wrapper.run(x.q, x.k, x.v, v_scale="a", o_scale=2.0)


@pytest.mark.parametrize("value", (None, 1, [1]), ids=str)
@pytest.mark.parametrize("kind", ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"))
def test_a_sparse_wrapper_is_given_a_tensor_for_workspace(kind, value, device):
    wrapper = getattr(flashinfer, kind)(workspace(device))
    with pytest.raises(ValueError, match="^float_workspace_buffer: got "):
        wrapper.reset_workspace_buffer(value, None)


@pytest.mark.parametrize("name", ("seq_lens", "seq_lens_q", "packed_custom_mask", "max_token_per_sequence"))
def test_arguments_of_a_plan_that_are_of_another_kind(name, x, paged, device):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match=f"^{name}: got "):
        wrapper.plan(**{key: t.cpu() if isinstance(t, torch.Tensor) else t for key, t in
                        plan_arguments(x, paged, **{name: [3, 2]}).items()})  # fmt: skip


@pytest.mark.parametrize("value", (None, "a", 1.5, 0, torch.tensor([1, 1])), ids=str)
def test_queries_per_request_that_are_no_number_of_them(value, x, paged, device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="^q_len_per_req: got "):
        wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, 4, 2, 64, 4, q_len_per_req=value)
    wrapper.plan(paged.indptr, paged.indices, paged.last_page_len, 4, 2, 64, 4, q_len_per_req=torch.tensor(1))


@pytest.mark.parametrize(
    "argument, change",
    [
        ("num_qo_heads", dict(num_qo_heads=5)),
        ("num_qo_heads", dict(num_qo_heads=0)),
        ("num_qo_heads", dict(num_qo_heads=258, num_kv_heads=2)),
        ("num_kv_heads", dict(num_kv_heads=0)),
        ("page_size", dict(page_size=0)),
        ("head_dim_qk", dict(head_dim_qk=0)),
        ("head_dim_vo", dict(head_dim_vo=-1)),
        ("pos_encoding_mode", dict(pos_encoding_mode="ROPE")),
        ("window_left", dict(window_left=-2)),
        ("logits_soft_cap", dict(logits_soft_cap=-1.0)),
        ("logits_soft_cap", dict(logits_soft_cap=1e39)),
        ("logits_soft_cap", dict(logits_soft_cap=1e-40)),
        ("sm_scale", dict(sm_scale=1e39)),
        ("fixed_split_size", dict(fixed_split_size=0)),
        ("dtype", dict(q_data_type="float17")),
        ("^q_data_type", dict(q_data_type=torch.ones(3))),
        ("^kv_data_type", dict(kv_data_type=torch.ones(3))),
        ("^o_data_type", dict(o_data_type=torch.ones(3))),
        ("^use_fp16_qk_reduction", dict(use_fp16_qk_reduction="no")),
        ("^use_fp16_qk_reduction", dict(use_fp16_qk_reduction=torch.ones(2))),
        ("^non_blocking", dict(non_blocking="False")),
        ("^disable_split_kv", dict(disable_split_kv="False")),
        ("^head_dim_qk", dict(head_dim_qk=1 << 31)),
        ("^seq_lens", dict(seq_lens=torch.empty(2, dtype=torch.int32, device="meta"))),
        ("token_pos_in_items_ptr", dict(prefix_len_ptr=torch.tensor([1, 1]))),
    ],
)
def test_plan_names_the_argument(argument, change, x, paged, device):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match=argument):
        wrapper.plan(**plan_arguments(x, paged, **change))


@pytest.mark.parametrize(
    "argument, name, value",
    [
        ("qo_indptr", "qo_indptr", [0, 4, 3]),
        ("qo_indptr", "qo_indptr", [-1, 3, 5]),
        ("kv_indptr", "paged_kv_indptr", [0, 3, 2]),
        ("kv_indptr", "paged_kv_indptr", [0, 3, 99]),
        ("kv_indptr", "paged_kv_indptr", [0, 3]),
        ("last_page_len", "paged_kv_last_page_len", [1, 5]),
        ("last_page_len", "paged_kv_last_page_len", [1]),
        ("last_page_len", "paged_kv_last_page_len", [-1, 1]),
    ],
)
def test_tables_on_the_host_are_checked(argument, name, value, x, paged, device):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match=argument):
        wrapper.plan(**plan_arguments(x, paged, **{name: torch.tensor(value)}))


def test_tables_on_the_device_are_checked_in_debug_mode(x, paged, device, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DEBUG", "1")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    falling = torch.tensor([0, 4, 3], device=device)
    with pytest.raises(ValueError, match="qo_indptr"):
        wrapper.plan(**plan_arguments(x, paged, qo_indptr=falling))
    beyond = paged.indices.clone()
    beyond[1] = 1000
    wrapper.plan(**plan_arguments(x, paged, paged_kv_indices=beyond))
    with pytest.raises(ValueError, match="paged_kv_indices"):
        wrapper.run(x.q, paged.kv_cache)
    wrapper.plan(**plan_arguments(x, paged, paged_kv_indices=-beyond))
    with pytest.raises(ValueError, match="paged_kv_indices"):
        wrapper.run(x.q, paged.kv_cache)
    wrapper.plan(**plan_arguments(x, paged))
    with pytest.raises(ValueError, match="qo_indptr"):
        wrapper.run(x.q[:4], paged.kv_cache)


def test_run_names_the_argument(x, paged, device):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(x.q, paged.kv_cache)
    wrapper.plan(**plan_arguments(x, paged))
    kv = paged.kv_cache
    cases = [
        ("q", (x.q[:, :2], kv), {}),
        ("q", (x.q.float(), kv), {}),
        ("q", (x.q[..., :32], kv), {}),
        ("q", (x.q[0], kv), {}),
        (r"^paged_kv_cache\[0\]: ", (x.q, kv.float()), {}),
        (r"^paged_kv_cache\[0\]: ", (x.q, kv[..., :32]), {}),
        (r"^paged_kv_cache\[0\]: ", (x.q, kv[:, :, :3]), {}),
        ("paged_kv_cache", (x.q, kv[:, :1]), {}),
        ("paged_kv_cache", (x.q, (kv, kv, kv)), {}),
        ("paged_kv_cache", (x.q, (kv, kv)), {}),
        (r"^paged_kv_cache\[1\]: ", (x.q, (kv[:, 0], kv[:-1, 1])), {}),
        ("out", (x.q, kv), dict(out=torch.empty(5, 4, 32, dtype=x.q.dtype, device=device))),
        ("out", (x.q, kv), dict(out=torch.empty(5, 4, 64, device=device))),
        ("lse", (x.q, kv), dict(lse=torch.empty(5, 3, device=device), return_lse=True)),
        ("sinks", (x.q, kv), dict(sinks=torch.zeros(3, device=device))),
        ("k_scale", (x.q, kv), dict(k_scale=torch.ones(3, device=device))),
        ("args", (x.q, kv, 1.0), {}),
        ("kv_block_scales", (x.q, kv), dict(kv_block_scales=(x.q, x.q))),
        ("window_left", (x.q, kv), dict(window_left=-2)),
        ("^return_lse: got 'False'", (x.q, kv), dict(return_lse="False")),
    ]
    for argument, args, kwargs in cases:
        with pytest.raises(ValueError, match=argument.replace("args", r"\*args")):
            wrapper.run(*args, **kwargs)


def test_constructor_names_the_argument(device):
    ws = workspace(device)
    with pytest.raises(ValueError, match="kv_layout"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(ws, "NDH")
    with pytest.raises(ValueError, match="backend"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(ws, backend="fa4")
    with pytest.raises(ValueError, match="jit_args"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(ws, jit_args=["name"])
    with pytest.raises(ValueError, match="kv_indptr"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(ws, use_cuda_graph=True)
    with pytest.raises(ValueError, match="qo_indptr"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(ws, use_cuda_graph=True)


def test_single_names_the_argument(x, device):
    q, k, v = x.request(0)
    single = flashinfer.single_prefill_with_kv_cache
    with pytest.raises(ValueError, match="custom_mask"):
        single(q, k, v, custom_mask=torch.ones(3, 8, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match="kv_cache_sf"):
        single(q, k, v, kv_cache_sf=(k, v))
    with pytest.raises(ValueError, match="k_scale"):
        single(q, k, v, scale_k=torch.ones(1), k_scale=2.0)
    with pytest.raises(ValueError, match="q: got"):
        flashinfer.single_decode_with_kv_cache(q, k, v)
    with pytest.raises(ValueError, match="v: got"):
        single(q, k, v[:-1])
    with pytest.raises(ValueError, match="^k: got"):
        single(q, k[0, 0, 0], v, custom_mask=torch.ones(3, 9, dtype=torch.bool, device=device))


def test_an_output_that_shares_memory_in_part(x, paged, device):
    """Refused in a call that is like an earlier one, too; in place it is taken."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(**plan_arguments(x, paged))
    whole = torch.cat((x.q, x.q[:1]))
    q, out = whole[:-1], torch.empty_like(x.q)
    expected = wrapper.run(x.q, paged.kv_cache)
    for _ in range(3):
        assert_bitwise(wrapper.run(q, paged.kv_cache, out=out), expected)
        with pytest.raises(ValueError, match="^out: got some of the memory of q; allowed: all of it in its place"):
            wrapper.run(q, paged.kv_cache, out=whole[1:])
    assert_bitwise(wrapper.run(q, paged.kv_cache, out=q), expected)


def test_the_older_forward_names_the_argument(x, paged, device):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(**plan_arguments(x, paged))
    with pytest.raises(ValueError, match="^sm_scale: got a tensor"):
        wrapper.forward(x.q, paged.kv_cache, sm_scale=torch.ones(2))
    with pytest.raises(ValueError, match=r"^paged_kv_cache\[0\]: got "):
        wrapper.forward(x.q, paged.kv_cache[..., :32])


@pytest.mark.parametrize("value", (None, "a", torch.tensor(3), torch.tensor([[0, 5]]), torch.tensor([0, -1])), ids=str)
def test_offsets_of_rows_with_factors(value, x, device):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="^kv_indptr: got "):
        wrapper.plan(x.qo_indptr, value, 4, 2, 64, kv_data_type="nvfp4")


UPSTREAMS = (
    "fa2", "fa3", "cudnn", "cutlass", "trtllm-gen", "cute-dsl", "cute-dsl-prims", "cutile", "fmha_v2", "xqa", "cake",
    "cake_cute", "prims-ts",
)  # fmt: skip


@pytest.mark.parametrize("backend", UPSTREAMS)
def test_upstreams_names_refuse_nothing(backend, x, paged, device):
    """float32, one-token queries, soft caps: what no kernel of such a name takes upstream."""
    q, k, v = (t.float() for t in x.request(0))
    call = dict(logits_soft_cap=5.0, causal=True)
    expected = flashinfer.single_prefill_with_kv_cache(q, k, v, **call)
    assert_bitwise(flashinfer.single_prefill_with_kv_cache(q, k, v, backend=backend, **call), expected)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
    wrapper.plan(**plan_arguments(x, paged, logits_soft_cap=5.0))
    assert wrapper.run(x.q, paged.kv_cache).shape == x.q.shape
    ran = wrapper.explain().variant.name
    assert ran == "reference" if device.type == "cpu" else ran != "reference"
    # On Hopper, the decode of a chip of its own name falls to the next variant that takes it.
    assert decode.select(wrapper.explain().problem, named("90a"), backend).variant.name in ("sm80", "portable")


def test_our_own_names_pin(x, device):
    q, k, v = x.request(0)
    with pytest.raises(UnsupportedConfig, match="sm90"):
        flashinfer.single_prefill_with_kv_cache(q.float(), k.float(), v.float(), backend="sm90")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend="sm90")
    with pytest.raises(UnsupportedConfig, match="^backend: got 'sm90'; allowed for (prefill|decode)") as error:
        wrapper.plan(x.qo_indptr, x.kv_indptr, 4, 2, 64, q_data_type=torch.float32)
    assert len(str(error.value)) < 300


def test_ragged_v_and_o_offsets_must_be_those_of_k_and_q(x, device):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(x.qo_indptr, x.kv_indptr, 4, 2, 64, v_indptr=x.kv_indptr.clone(), o_indptr=x.qo_indptr.cpu())
    for name in ("v_indptr", "o_indptr"):
        with pytest.raises(ValueError, match=name):
            wrapper.plan(x.qo_indptr, x.kv_indptr, 4, 2, 64, **{name: x.qo_indptr + 1})


def test_tables_and_factors_of_another_kind(device):
    x = generate.ragged_batch([3, 2], [5, 9], 4, 2, 64, dtype=torch.float16, device=device)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    for name, given in (("v_indptr", "offsets"), ("v_indptr", x.kv_indptr.to("meta")), ("o_indptr", [0, 3, 5])):
        with pytest.raises(ValueError, match=f"^{name}: got "):
            ragged.plan(x.qo_indptr, x.kv_indptr, 4, 2, 64, **{name: given})
    for name in ("qo_indptr", "kv_indptr"):
        tables = dict(qo_indptr=x.qo_indptr, kv_indptr=x.kv_indptr) | {name: None}
        with pytest.raises(ValueError, match=f"^{name}: got None"):
            ragged.plan(**tables, num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, v_indptr=x.kv_indptr.clone(),
                        o_indptr=x.qo_indptr.clone())  # fmt: skip
    made = generate.paged(x, 4)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    tables = x.qo_indptr.cpu(), made.indptr.cpu(), made.indices.cpu(), made.last_page_len.cpu()
    for given in (torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3), torch.zeros(2, 3, device="meta")):
        with pytest.raises(ValueError, match="^block_tables: got "):
            wrapper.plan(*tables, 4, 2, 64, 4, block_tables=given)
    blocks = torch.tensor([[0, 1, 0], [2, 3, 4]], dtype=torch.int32)
    with pytest.raises(ValueError, match="^paged_kv_indices: got "):
        wrapper.plan(*tables[:2], tables[2][None], tables[3], 4, 2, 64, 4, block_tables=blocks)
    wrapper.plan(*tables, 4, 2, 64, 4)
    with pytest.raises(ValueError, match="^k_scale: got "):
        wrapper.run(x.q, made.kv_cache, k_scale=torch.ones(2, device="meta"))
    codes = torch.zeros(9, 2, 32, dtype=torch.uint8, device=device)
    factors = torch.zeros(9, 2, 4, device=device)
    with pytest.raises(ValueError, match=r"^kv_cache_sf\[0\]: got torch.float32"):
        flashinfer.single_prefill_with_kv_cache(x.q, codes, codes, kv_cache_sf=(factors, factors))
    ragged.plan(x.qo_indptr, x.kv_indptr, 4, 2, 64, kv_data_type="nvfp4")
    codes, factors = codes.repeat(2, 1, 1)[:14], factors.repeat(2, 1, 1)[:14]
    with pytest.raises(ValueError, match=r"^kv_cache_sf\[0\]: got torch.float32"):
        ragged.run(x.q, codes, codes, kv_cache_sf=(factors, factors))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_tables_without_values(dtype, device):
    """Fake tensors say that they are on the host, and have no memory there to read."""
    tables = [torch.tensor(values, dtype=dtype) for values in ([0, 2], [0, 1], [3])]
    mode = FakeTensorMode()
    fake = [mode.from_tensor(t) for t in tables]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="^indptr: got a tensor without memory"):
        wrapper.plan(*fake, 4, 2, 64, 16)
    wrapper.plan(*tables, 4, 2, 64, 16)
