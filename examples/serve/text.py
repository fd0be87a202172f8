"""A text that grows by tokens and ends before a stop string."""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class GrowingText:
    """Decodes tokens behind a prompt. What may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stops: list[str]):
        self.tokenizer, self.stops = tokenizer, stops
        self.stream = DecodeStream(ids=prompt, skip_special_tokens=True)
        self.held, self.stopped = "", False

    def add(self, token: int) -> str:
        """The text that is certain with this token: nothing, where a character or a stop string may go on."""
        self.held += self.stream.step(self.tokenizer, token) or ""
        found = [at for at in map(self.held.find, self.stops) if at >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        ends = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        return self._release(len(self.held) - max(ends, default=0))

    def end(self) -> str:
        """What was held back, of a text that ends without a stop string."""
        return "" if self.stopped else self._release(len(self.held))

    def _release(self, count: int) -> str:
        text, self.held = self.held[:count], self.held[count:]
        return text
