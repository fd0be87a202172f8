"""`attn_implementation="flashinfer"` against transformers' eager attention: logits in float64, and greedy tokens."""

import contextlib
import importlib
import inspect
import itertools

import pytest
import torch

from flashinfer.testing.compare import assert_close


def hugging_face():
    """transformers. Its import takes seconds, for which no collection of tests waits."""
    return importlib.import_module("transformers")


def integration():
    return importlib.import_module("flashinfer.integrations.transformers")


VOCABULARY, WINDOW, NEW_TOKENS = 97, 5, 6
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, eos_token_id=None, bos_token_id=1,
)  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=10000.0)
CONFIGS = {
    "grouped heads": lambda: hugging_face().LlamaConfig(**SIZES),
    "windows": lambda: hugging_face().MistralConfig(**SIZES, sliding_window=WINDOW),
    "windows in every other layer, softcap": lambda: hugging_face().Gemma2Config(
        **SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=20
    ),
    "sinks": lambda: hugging_face().GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1, rope_parameters=ROPE
    ),
}
LATENT = dict(
    {**SIZES, "head_dim": 8, "num_key_value_heads": 4}, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=2, rope_parameters=ROPE,
)  # fmt: skip
MODELS = pytest.mark.parametrize("name", CONFIGS)

PADDING = torch.ones(3, 11, dtype=torch.int64)
PADDING[0, :4] = PADDING[1, :1] = 0
HOLES = PADDING.clone()
HOLES[2, 3:6] = 0
MASKS = {"none": torch.ones_like(PADDING), "left": PADDING, "right": PADDING.flip(1), "holes": HOLES}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Eager attention adds the least float to what is masked, which overflows in rows that see nothing: add less."""
    masks = importlib.import_module("transformers.masking_utils")
    integration().register()
    integration().register()

    def eager_mask(*args, dtype, **kwargs):
        seen = masks.sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -1e30)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(masks.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "eager", eager_mask)
        yield


def model_of(config, auto="AutoModelForCausalLM", device="cpu"):
    """Weights that make the logits of two tokens differ."""
    torch.manual_seed(1)
    make = getattr(hugging_face(), auto).from_config
    model = make(config, attn_implementation="eager", experts_implementation="eager")
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.to(device)


def tokens(*shape, device="cpu"):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(2)).to(device)


def three_ways(model, run):
    """What `run(model)` gives with this library, eagerly in the same dtype, and eagerly in float64."""
    dtype, results = model.dtype, []
    for implementation, computed_in in ((integration().NAME, dtype), ("eager", dtype), ("eager", torch.float64)):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        results.append(run(model.to(computed_in)))
    model.to(dtype)
    return results


@MODELS
@pytest.mark.parametrize("padding", MASKS)
def test_logits(name, padding, device):
    ids, mask = tokens(3, 11, device=device), MASKS[padding].to(device)
    model = model_of(CONFIGS[name](), device=device)
    assert_close(*three_ways(model, lambda m: m(ids, attention_mask=mask).logits[mask.bool()]))


def test_latent_attention(device):
    """Queries and keys are longer than values."""
    ids = tokens(2, 9, device=device)
    model = model_of(hugging_face().DeepseekV3Config(**LATENT), device=device)
    assert_close(*three_ways(model, lambda m: m(ids).logits))


def test_bidirectional_encoder(device):
    ids, mask = tokens(3, 11, device=device), MASKS["right"].to(device)
    sizes = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
    model = model_of(hugging_face().BertConfig(**{**sizes, "hidden_size": 64}), "AutoModel", device)
    assert_close(*three_ways(model, lambda m: m(ids, attention_mask=mask).last_hidden_state[mask.bool()]))


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_chunks_of_a_prompt(cache, device):
    """A second forward of several tokens, over a cache that the first has filled."""
    ids = tokens(2, 13, device=device)

    def run(model):
        options = {"max_cache_len": 20} if cache == "StaticCache" else {}
        past = getattr(hugging_face(), cache)(config=model.config, **options)
        return torch.cat([model(part, past_key_values=past).logits for part in ids.split([7, 5, 1], 1)], 1)

    assert_close(*three_ways(model_of(CONFIGS["windows"](), device=device), run))


def test_packed_texts(device):
    """Positions that begin again, and a mask of the caller's: keys of other texts are not seen."""
    ids, lengths = tokens(1, 12, device=device), [5, 7]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    text = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    seen = (text[:, None] == text)[None, None].tril().to(device)
    model = model_of(CONFIGS["grouped heads"](), device=device)
    assert_close(*three_ways(model, lambda m: m(ids, position_ids=positions).logits))

    def additive(m):
        bias = torch.zeros(seen.shape, dtype=m.dtype, device=device).masked_fill(~seen, -1e38)
        return m(ids, position_ids=positions, attention_mask=bias).logits

    assert_close(*three_ways(model, additive))


@MODELS
def test_greedy_tokens_of_padded_prompts(name, device):
    model, ids = model_of(CONFIGS[name](), device=device), tokens(3, 11, device=device)
    options = dict(attention_mask=PADDING.to(device), max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = model.generate(ids, **options)
    model.set_attn_implementation(integration().NAME)
    for cache in ("dynamic", "static"):
        assert model.generate(ids, cache_implementation=cache, **options).equal(expected), cache


@MODELS
def test_continuous_batching(name, device):
    """Prompts in chunks, beside requests that decode, over transformers' paged cache and its rings of windows."""
    if "page_size" not in inspect.signature(hugging_face().ContinuousBatchingConfig).parameters:
        pytest.skip(f"transformers {hugging_face().__version__}: ContinuousBatchingConfig has page_size from 5.20 on")
    model = model_of(CONFIGS[name](), device=device)
    prompts = [tokens(length).tolist() for length in (3, 17, 1, 30)]
    greedy = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options = hugging_face().GenerationConfig(**greedy)
    expected = []
    for prompt in prompts:
        text = model.generate(torch.tensor([prompt], device=device), generation_config=options)
        expected.append(text[0, len(prompt) :].tolist())
    model.set_attn_implementation(integration().NAME)
    sizes = dict(page_size=4, num_blocks=64, max_batch_tokens=16)
    cache = hugging_face().ContinuousBatchingConfig(**sizes, use_cuda_graph=False)
    served = model.generate_batch(prompts, options, continuous_batching_config=cache, progress_bar=False)
    assert [request.generated_tokens for request in served.values()] == expected


def test_a_forward_plans_once_for_each_kind_of_layer(monkeypatch):
    plans, plan = [], integration().BatchPrefillWithPagedKVCacheWrapper.plan

    def counted(self, *args, **kwargs):
        plans.append(kwargs["window_left"])
        return plan(self, *args, **kwargs)

    monkeypatch.setattr(integration().BatchPrefillWithPagedKVCacheWrapper, "plan", counted)
    config = hugging_face().Gemma2Config(**{**SIZES, "num_hidden_layers": 6}, sliding_window=WINDOW)
    model = model_of(config)
    model.set_attn_implementation(integration().NAME)
    model(tokens(3, 11), attention_mask=PADDING)
    assert sorted(plans) == [-1, WINDOW - 1]


class Layer(torch.nn.Module):
    is_causal = True


def call(**changed):
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 5, 16)
    given = dict(query=q, key=k, value=k.clone(), attention_mask=None) | changed
    return integration().attention(Layer(), **given)[0]


@pytest.mark.parametrize("mode", (contextlib.nullcontext, torch.inference_mode))
@pytest.mark.parametrize("layer", (None, 0))
def test_a_mask_that_is_written_to(mode, layer):
    """Between two forwards, by a write that torch does not count where there is one."""
    q, k, v = torch.randn(3, 2, 2, 5, 16).unbind(0)
    module = Layer()
    module.layer_idx = layer
    with mode():
        mask = torch.ones(2, 5, dtype=torch.int64)
        given = dict(query=q, key=k, value=v, attention_mask=mask)
        integration().attention(module, **given)
        (mask if layer is None else mask.data)[0, :2] = 0
        out = integration().attention(module, **given)[0]
        fresh = given | dict(attention_mask=mask.clone())
        torch.testing.assert_close(out, integration().attention(Layer(), **fresh)[0])
        seen = torch.ones(5, 5, dtype=torch.bool).tril() & mask.bool()[:, None, None]
        truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).nan_to_num()
        torch.testing.assert_close(out, truth.transpose(1, 2))


@pytest.mark.parametrize("length", (1, 5))
def test_keys_of_one_place(length):
    """A stride of 0 between tokens."""
    q, k, v = torch.randn(3, 2, 4, 1, 16).unbind(0)
    k, v = (t[:, :2].as_strided((2, 2, length, 16), (64, 16, 0, 1), t.storage_offset()) for t in (k, v))
    out = call(query=q, key=k, value=v, is_causal=False)
    shared = (t.repeat_interleave(2, 1).contiguous() for t in (k, v))
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, *shared).transpose(1, 2))


@pytest.mark.parametrize("length", (1, 4))
@pytest.mark.parametrize("axes", itertools.permutations(range(3)))
def test_keys_in_any_order_of_axes(length, axes):
    """Requests, heads and tokens; the stride of an axis of 1 may be any."""
    back = [axes.index(i) for i in range(3)]

    def laid_out(*shape):
        return torch.randn(*(shape[i] for i in axes), 16).permute(*back, 3)

    q, k, v = laid_out(3, 4, 1), laid_out(3, 2, length), laid_out(3, 2, length)
    out = call(query=q, key=k, value=v)
    shared = (t.repeat_interleave(2, 1) for t in (k, v))
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, *shared).transpose(1, 2))


def test_offsets_of_packed_requests():
    """What vision towers pass: cu_seq_lens, without causality."""
    q, k, v = torch.randn(3, 1, 2, 7, 16)
    offsets = torch.tensor([0, 3, 7])
    out = call(query=q, key=k, value=v, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, is_causal=False)
    requests = zip(*(t.split([3, 4], 2) for t in (q, k, v)))
    parts = [torch.nn.functional.scaled_dot_product_attention(*request) for request in requests]
    torch.testing.assert_close(out, torch.cat(parts, 2).transpose(1, 2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(dropout=0.1), "dropout: got 0.1"),
        (dict(position_bias=torch.ones(1, 4, 3, 5)), "position_bias"),
        (dict(output_attentions=True), "output_attentions: got True"),
        (dict(query=torch.randn(1, 4, 3, 16, requires_grad=True)), "require gradients"),
        (dict(sliding_window=2, is_causal=False), "sliding_window: got 2 without is_causal"),
        (dict(attention_mask=torch.ones(1, 4, 3, 5, dtype=torch.bool)), r"attention_mask: got shape \[1, 4, 3, 5\]"),
        (dict(attention_mask=torch.full((1, 1, 3, 5), -1.0)), "attention_mask: got a bias"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        call(**changed)


def test_a_model_without_flash_attention_is_refused(monkeypatch):
    model = model_of(CONFIGS["grouped heads"]())
    monkeypatch.setattr(type(model), "_supports_flash_attn", False)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not take flash attention"):
        model.set_attn_implementation(integration().NAME)
