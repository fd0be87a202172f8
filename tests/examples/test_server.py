"""The example server over HTTP, with a tiny random model: texts are those of the engine's requests alone."""

import asyncio
import json

import httpx2
import pytest
import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.serve.runner import Sampled, SamplingEngine
from examples.serve.server import build
from examples.serve.text import GrowingText
from tests.examples.test_serve import CONFIG, VOCABULARY, random_prompt, weights_on

NAME, EOS, NEW_TOKENS = "tiny", 96, 12
WORDS = {f"w{i}" if i < EOS else "<eos>": i for i in range(VOCABULARY)}


def make_tokenizer():
    # Its import takes seconds, for which no collection of tests waits.
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(WORDS))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


def text_of(tokens):
    return " ".join(f"w{token}" for token in tokens)


def make_engine(num_pages=600):
    return SamplingEngine(CONFIG, weights_on("cpu"), num_pages, 4, 160, 64, EOS, None)


def alone(prompt, count=NEW_TOKENS, **sampling):
    """What the engine makes of a request that has it to itself."""
    engine, request = make_engine(), Sampled(prompt, count, **{"temperature": 0.0} | sampling)
    engine.serve([request])
    return request.output


class Client:
    """A server on a free port, and requests to it. `run` gives a coroutine function the client."""

    def run(self, scenario, engine=None):
        return asyncio.run(self._run(scenario, engine or make_engine()))

    async def _run(self, scenario, engine):
        self.engine = engine
        config = uvicorn.Config(build(engine, make_tokenizer(), NAME), port=0, log_level="warning")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        limits = httpx2.Limits(max_connections=None)
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=60) as self.http:
                return await scenario(self)
        finally:
            server.should_exit = True
            await serving

    async def post(self, path="/v1/completions", **body):
        greedy = {"model": NAME, "temperature": 0, "max_tokens": NEW_TOKENS}
        return await self.http.post(path, json=greedy | body)

    async def events(self, path="/v1/completions", **body):
        """The documents of a stream, which ends with [DONE]."""
        greedy = {"model": NAME, "temperature": 0, "max_tokens": NEW_TOKENS, "stream": True}
        found = []
        async with self.http.stream("POST", path, json=greedy | body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                assert not line or line.startswith("data: ")
                found += [line.removeprefix("data: ")] if line else []
        assert found.pop() == "[DONE]"
        return [json.loads(event) for event in found]


@pytest.fixture
def client():
    return Client()


def run(client, method, *args, **kwargs):
    return client.run(lambda c: getattr(c, method)(*args, **kwargs))


def test_a_completion_of_a_text_and_of_tokens(client):
    prompt = random_prompt(1, 9)
    expected = alone(prompt)
    assert EOS not in expected

    async def scenario(c):
        models = (await c.http.get("/v1/models")).json()
        return models, (await c.post(prompt=text_of(prompt))).json(), (await c.post(prompt=prompt)).json()

    models, of_text, of_tokens = client.run(scenario)
    assert [model["id"] for model in models["data"]] == [NAME]
    assert of_text["object"] == "text_completion" and of_text["model"] == NAME
    choice = {"index": 0, "text": " " + text_of(expected), "logprobs": None, "finish_reason": "length"}
    assert of_text["choices"] == of_tokens["choices"] == [choice]
    counts = {"prompt_tokens": 9, "completion_tokens": NEW_TOKENS, "total_tokens": 9 + NEW_TOKENS}
    assert of_text["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    # Two whole pages of the same prompt.
    assert of_tokens["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


def test_several_prompts_and_choices_each_with_its_seed(client):
    prompts, count = [random_prompt(2, 5), random_prompt(3, 7)], 6
    options = dict(temperature=0.8, top_p=0.9, seed=11, n=2)
    reply = run(client, "post", prompt=prompts, max_tokens=count, **options).json()
    sampled = [
        alone(prompt, count, temperature=0.8, top_p=0.9, seed=seed) for prompt in prompts for seed in (11, 12)
    ]
    texts = [" " + text_of(token for token in tokens if token != EOS) for tokens in sampled]
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert len(set(texts)) == 4
    assert reply["usage"]["prompt_tokens"] == 12


def test_a_stream_and_its_usage(client):
    prompt = random_prompt(1, 9)
    events = run(client, "events", prompt=prompt, stream_options={"include_usage": True})
    *parts, last = events
    assert "".join(part["choices"][0]["text"] for part in parts) == " " + text_of(alone(prompt))
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == NEW_TOKENS


def test_chat(client):
    messages = [
        {"role": "system", "content": "w1 w2"},
        {"role": "user", "content": [{"type": "text", "text": "w3"}]},
    ]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    body = dict(path="/v1/chat/completions", messages=messages, max_tokens=None, max_completion_tokens=5)
    expected = " " + text_of(alone([1, 2, 3], 5))

    async def scenario(c):
        return (await c.post(**body)).json(), await c.events(**body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.examples.test_server.make_tokenizer", lambda: tokenizer)
        whole, events = client.run(scenario)
    message = {"role": "assistant", "content": expected, "refusal": None}
    assert whole["object"] == "chat.completion" and whole["choices"][0]["message"] == message
    deltas = [event["choices"][0]["delta"] for event in events]
    assert events[0]["object"] == "chat.completion.chunk" and deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == expected


def test_stop_strings_end_a_text_before_them(client):
    prompt = random_prompt(1, 9)
    expected = alone(prompt)
    stop = f"w{expected[4]} w{expected[5]}"
    at = text_of(expected).index(stop)

    async def scenario(c):
        return (await c.post(prompt=prompt, stop=stop)).json(), await c.events(prompt=prompt, stop=["nowhere", stop])

    whole, events = client.run(scenario)
    assert whole["choices"][0]["text"] == " " + text_of(expected)[:at]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert "".join(event["choices"][0]["text"] for event in events) == " " + text_of(expected)[:at]
    assert not client.engine.running and not client.engine.waiting


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(client, stream):
    async def scenario(c):
        body = {"model": NAME, "prompt": random_prompt(1, 9), "max_tokens": 150, "stream": stream, "temperature": 0}
        engine, slow = c.engine, c.engine.step

        def step():
            if engine.clock == 3:
                loop.call_soon_threadsafe(begun.set)
            slow()

        loop, begun, engine.step, engine.eos_id = asyncio.get_running_loop(), asyncio.Event(), step, -1
        request = asyncio.create_task(c.http.post("/v1/completions", json=body))
        await begun.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        while not engine.finished:
            await asyncio.sleep(0.001)
        return len(engine.finished[0].output)

    assert client.run(scenario) < 150


# path, body, status, param, message
ERRORS = [
    ("/v1/completions", {"prompt": "w1", "temperature": 3}, 400, "temperature", "less than or equal to 2"),
    ("/v1/completions", {"prompt": "w1", "logit_bias": {"3": 1}}, 400, "logit_bias", "at most 0"),
    ("/v1/completions", {"prompt": "w1", "best_of": 2}, 400, "best_of", "not permitted"),
    ("/v1/completions", {}, 400, "prompt", "required"),
    ("/v1/completions", {"prompt": "w1", "model": "other"}, 404, "model", "'other'; allowed: 'tiny'"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt", "allowed: a prompt"),
    ("/v1/completions", {"prompt": [1, 97]}, 400, "prompt", "allowed: 0 to 96"),
    ("/v1/completions", {"prompt": "w1", "max_tokens": 500}, 400, "prompt", "got up to 500 tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content", "required"),
    ("/v1/chat/completions", {"messages": [], "tools": []}, 400, "messages", "at least 1"),
    ("/v1/embeddings", {}, 404, None, "Not Found"),
    ("/v1/models", {}, 405, None, "Method Not Allowed"),
]


def test_errors_have_openais_shape(client):
    async def scenario(c):
        invalid = await c.http.post("/v1/completions", content="{")
        return invalid, [await c.post(path, **body) for path, body, *_ in ERRORS]

    invalid, replies = client.run(scenario)
    assert invalid.status_code == 400 and "Invalid JSON" in invalid.json()["error"]["message"]
    for reply, (path, body, status, param, message) in zip(replies, ERRORS, strict=True):
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (status, param), (path, body)
        assert message in error["message"] and error["type"] == "invalid_request_error"


def test_a_failure_of_the_server_has_openais_shape(client, monkeypatch):
    """The tokenizer has no word for it."""
    reply = run(client, "post", prompt="unknown")
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"


def test_an_engine_that_fails_fails_its_requests(client, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "choose", lambda logits, ready: 1 / 0)
    monkeypatch.setattr("threading.excepthook", lambda failed: None)

    async def scenario(c):
        return [(await c.post(prompt="w1")).status_code for _ in range(2)]

    assert client.run(scenario, engine) == [500, 500]


def test_64_streams_at_once(client):
    prompts = [random_prompt(100 + i, 1 + i % 13) for i in range(64)]

    async def scenario(c):
        texts = await asyncio.gather(*(c.events(prompt=prompt, max_tokens=6) for prompt in prompts))
        return ["".join(event["choices"][0]["text"] for event in events) for events in texts]

    served, engine = client.run(scenario), make_engine(1200)
    requests = [Sampled(prompt, 6, temperature=0.0) for prompt in prompts]
    engine.serve(requests)
    expected = [" " + text_of(token for token in r.output if token != EOS) for r in requests]
    assert [text.strip() for text in served] == [text.strip() for text in expected]


def test_a_text_holds_back_what_may_go_on():
    letters = Tokenizer(models.WordLevel({f"<0x{byte:02X}>": byte for byte in range(256)}))
    letters.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    def parts(text, stops):
        growing = GrowingText(letters, [], stops)
        return [growing.add(byte) for byte in text.encode()] + [growing.end()], growing.stopped

    assert parts("aé€", []) == (["a", "", "é", "", "", "€", ""], False)
    assert parts("xENy", ["END"]) == (["x", "", "", "ENy", ""], False)
    assert parts("xEND", ["END", "D"]) == (["x", "", "", "", ""], True)
    assert parts("aab", ["ab"]) == (["", "a", "", ""], True)
    assert parts("xEN", ["END"]) == (["x", "", "", "EN"], False)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
