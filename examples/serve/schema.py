"""Requests of OpenAI's HTTP interface. A field that is not here, or has another value than allowed, is an error."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Nothing = Annotated[float, Field(ge=0, le=0)]
Stop = Annotated[str, Field(min_length=1)]
Texts = str | list[int] | list[str] | list[list[int]]


class Model(BaseModel, extra="forbid"):
    """A part of a request."""


class StreamOptions(Model):
    include_usage: bool = False


class Common(Model):
    """What both kinds of requests have."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: Nothing = 0
    frequency_penalty: Nothing = 0
    logit_bias: Annotated[dict, Field(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Common):
    """POST /v1/completions"""

    prompt: Texts
    max_tokens: int = Field(16, ge=1)
    logprobs: None = None
    echo: Literal[False] = False
    suffix: None = None

    @property
    def prompts(self) -> list:
        """Texts, or lists of tokens."""
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)

    @property
    def longest(self) -> int:
        return self.max_tokens


class TextPart(Model):
    type: Literal["text"]
    text: str


class Message(Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict:
        """As chat templates take it."""
        parts = self.content if isinstance(self.content, list) else [TextPart(type="text", text=self.content)]
        return {"role": self.role, "content": "".join(part.text for part in parts)}


class Chat(Common):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
