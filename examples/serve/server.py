"""OpenAI's HTTP interface over the example engine.

    python -m examples.serve.server --port 8000

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")

/v1/models, /v1/completions and /v1/chat/completions: streams, several prompts and choices, stop strings, temperature,
top_p, seed, usage. A client that goes away ends its requests. Errors have OpenAI's shape.
"""

import argparse
import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .runner import Runner, Sampled, SamplingEngine
from .schema import Chat, Common, Completion
from .text import GrowingText

# For a model whose tokenizer brings none.
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Refused(Exception):
    """A request that is not served, in OpenAI's words."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.response = JSONResponse({"error": error}, status)


@dataclass(eq=False)
class Choice:
    """One text of a reply."""

    index: int
    request: Sampled
    text: GrowingText


class Reply:
    """The texts of one HTTP request, as they grow."""

    def __init__(self, runner: Runner, choices: list[Choice]):
        self.runner, self.choices, self.events = runner, choices, asyncio.Queue()

    async def deltas(self, http: Request) -> AsyncIterator[tuple[Choice, str, str | None]]:
        """New text of a choice, and "stop" or "length" where it ends. Ends early if the client goes away."""
        loop, pending = asyncio.get_running_loop(), set(self.choices)
        watch = asyncio.create_task(self._until_gone(http))
        try:
            for choice in self.choices:

                def deliver(token, last, choice=choice):
                    loop.call_soon_threadsafe(self.events.put_nowait, (choice, token, last))

                self.runner.submit(choice.request, deliver)
            while pending and (event := await self.events.get()):
                choice, token, last = event
                if choice not in pending:
                    continue
                if token is None:
                    raise Refused(500, "the engine has failed; its log says why")
                delta, reason = choice.text.add(token), None
                if choice.text.stopped or last:
                    pending.remove(choice)
                    ended = choice.text.stopped or token == self.runner.engine.eos_id
                    delta, reason = delta + choice.text.end(), "stop" if ended else "length"
                    self.runner.cancel(choice.request)
                yield choice, delta, reason
        finally:
            watch.cancel()
            for choice in pending:
                self.runner.cancel(choice.request)

    async def _until_gone(self, http: Request) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.events.put_nowait(None)

    def usage(self) -> dict:
        # Choices of one prompt count it once.
        prompts = {id(choice.request.prompt): choice.request for choice in self.choices}.values()
        prompt = sum(len(request.prompt) for request in prompts)
        new = sum(len(choice.request.output) for choice in self.choices)
        shared = sum(request.shared for request in prompts)
        details = {"prompt_tokens_details": {"cached_tokens": shared}}
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new} | details


class Service:
    """An engine, its tokenizer and the name it is served under."""

    def __init__(self, engine: SamplingEngine, tokenizer, name: str):
        self.runner, self.tokenizer, self.name = Runner(engine), tokenizer, name

    def encode(self, text: str) -> list[int]:
        first = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        return first + self.tokenizer.encode(text, add_special_tokens=False)

    def chat_prompt(self, body: Chat) -> list[int]:
        template = self.tokenizer.chat_template or CHAT_TEMPLATE
        messages = [message.plain() for message in body.messages]
        options = {"chat_template": template, "add_generation_prompt": True, "tokenize": False}
        text = self.tokenizer.apply_chat_template(messages, **options)
        return self.encode(text.removeprefix(self.tokenizer.bos_token or ""))

    def reply(self, body: Chat | Completion, prompts: list[list[int]], param: str) -> Reply:
        """The request's texts, checked and not begun."""
        if body.model != self.name:
            raise Refused(404, f"model: got {body.model!r}; allowed: {self.name!r}", "model", "model_not_found")
        seed, choices = secrets.randbits(62) if body.seed is None else body.seed, []
        for prompt in prompts:
            for i in range(body.n):
                room = self.runner.engine.longest - len(prompt) + 1
                request = Sampled(prompt, body.longest or max(room, 1))
                request.temperature, request.top_p = body.temperature, body.top_p
                # Choices of one prompt differ by their seeds, which count up.
                request.seed = (seed + i + 2**63) % 2**64 - 2**63
                text = GrowingText(self.tokenizer.backend_tokenizer, prompt, body.stops)
                self._check(request, param)
                choices.append(Choice(len(choices), request, text))
        return Reply(self.runner, choices)

    def _check(self, request: Sampled, param: str) -> None:
        vocabulary = len(self.tokenizer)
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise Refused(400, f"{param}: got tokens out of range; allowed: 0 to {vocabulary - 1}", param)
        try:
            self.runner.engine.check(request)
        except ValueError as error:
            raise Refused(400, str(error), param, "context_length_exceeded") from error


class Shape:
    """How one of the two interfaces words its objects."""

    def __init__(self, prefix: str, whole: str, part: str, model: str):
        self.head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self.whole, self.part, self.is_chat = whole, part, prefix == "chatcmpl"

    def choice(self, index: int, content: dict | str, reason: str | None, key: str = "message") -> dict:
        named = {key: content} if self.is_chat else {"text": content}
        return {"index": index, **named, "logprobs": None, "finish_reason": reason}

    async def at_once(self, reply: Reply, http: Request) -> dict:
        texts, reasons = {}, {}
        async for choice, delta, reason in reply.deltas(http):
            texts[choice.index] = texts.get(choice.index, "") + delta
            reasons[choice.index] = reason
        choices = []
        for index, text in sorted(texts.items()):
            content = {"role": "assistant", "content": text, "refusal": None} if self.is_chat else text
            choices.append(self.choice(index, content, reasons[index]))
        return {**self.head, "object": self.whole, "choices": choices, "usage": reply.usage()}

    async def streamed(self, reply: Reply, http: Request, with_usage: bool) -> AsyncIterator[str]:
        def event(choices, usage=None):
            document = {**self.head, "object": self.part, "choices": choices}
            return f"data: {json.dumps(document | ({'usage': usage} if with_usage else {}))}\n\n"

        if self.is_chat:
            first = {"role": "assistant", "content": ""}
            yield event([self.choice(choice.index, first, None, "delta") for choice in reply.choices])
        try:
            async for choice, delta, reason in reply.deltas(http):
                if delta or reason:
                    content = ({"content": delta} if delta else {}) if self.is_chat else delta
                    yield event([self.choice(choice.index, content, reason, "delta")])
        except Refused as error:
            yield f"data: {bytes(error.response.body).decode()}\n\n"
            return
        if with_usage:
            yield event([], reply.usage())
        yield "data: [DONE]\n\n"


def build(engine: SamplingEngine, tokenizer, name: str) -> Starlette:
    """The application; it owns the engine, which runs from the application's start to its end."""
    service, started = Service(engine, tokenizer, name), int(time.time())

    @asynccontextmanager
    async def lifespan(app):
        service.runner.start()
        yield
        service.runner.stop()

    async def models(http: Request) -> Response:
        model = {"id": name, "object": "model", "created": started, "owned_by": "flashinfer"}
        return JSONResponse({"object": "list", "data": [model]})

    async def answer(body: Common, http: Request, reply: Reply, shape: Shape) -> Response:
        if not body.stream:
            return JSONResponse(await shape.at_once(reply, http))
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(shape.streamed(reply, http, with_usage), media_type="text/event-stream")

    async def completions(http: Request) -> Response:
        body = Completion.model_validate_json(await http.body())
        prompts = [service.encode(p) if isinstance(p, str) else p for p in body.prompts]
        shape = Shape("cmpl", "text_completion", "text_completion", name)
        return await answer(body, http, service.reply(body, prompts, "prompt"), shape)

    async def chat(http: Request) -> Response:
        body = Chat.model_validate_json(await http.body())
        shape = Shape("chatcmpl", "chat.completion", "chat.completion.chunk", name)
        return await answer(body, http, service.reply(body, [service.chat_prompt(body)], "messages"), shape)

    routes = [
        Route("/v1/models", models),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    kinds = (Refused, ValidationError, HTTPException, Exception)
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=dict.fromkeys(kinds, error_response))


async def error_response(http: Request, error: Exception) -> Response:
    """Any error in OpenAI's shape."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        error = Refused(400, f"{param or 'body'}: {first['msg']}", param)
    elif isinstance(error, HTTPException):
        error = Refused(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
    elif not isinstance(error, Refused):
        error = Refused(500, f"{type(error).__name__}; the server's log says more")
    return error.response


def main(arguments=None) -> int:
    import torch

    from . import weights
    from .demo import device_and_dtype, positive
    from .model import Config

    about = "Serve Gemma 3 270M over HTTP."
    parser = argparse.ArgumentParser(prog="python -m examples.serve.server", description=about)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--max-length", type=positive, default=4096, help="longest prompt and text, in tokens (default 4096)")
    add("--pages", type=positive, default=2048, help="KV pages of 16 tokens (default 2048)")
    add("--chunk", type=positive, default=512, help="most tokens of one step (default 512)")
    device_and_dtype(parser)
    args = parser.parse_args(arguments)
    path = weights.gguf_file()
    tokenizer = weights.load_tokenizer(path)
    tensors = weights.load_weights(path, args.device, args.dtype)
    sizes = args.pages, 16, args.max_length, args.chunk, tokenizer.eos_token_id
    engine = SamplingEngine(Config(), tensors, *sizes, sample=torch.argmax)
    uvicorn.run(build(engine, tokenizer, "gemma-3-270m"), host=args.host, port=args.port)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
