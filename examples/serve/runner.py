"""The engine in a thread of its own, with requests that come and go while it runs, each sampled in its own way."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

import flashinfer

from .engine import Engine, Request

# Called in the engine's thread with a new token and whether it is the last; (None, True): the engine has failed.
Deliver = Callable[[int | None, bool], None]


@dataclass(eq=False)
class Sampled(Request):
    """A request with its way to sample. Its text depends on `seed` and not on what else is served."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


class SamplingEngine(Engine):
    """Samples each request in its own way, all of them in one call."""

    def choose(self, logits: torch.Tensor, ready: list[Sampled]) -> list[int]:
        def column(values, dtype):
            return torch.tensor(list(values), dtype=dtype, device=logits.device)

        temperature = column((r.temperature for r in ready), torch.float32)
        greedy = temperature == 0
        probs = flashinfer.softmax(logits.float(), torch.where(greedy, 1.0, temperature))
        sampled = flashinfer.top_p_sampling_from_probs(
            probs,
            column((r.top_p for r in ready), torch.float32),
            seed=column((r.seed for r in ready), torch.int64),
            offset=column((len(r.output) for r in ready), torch.int64),
        )
        return torch.where(greedy, logits.argmax(-1), sampled).tolist()


class Runner(threading.Thread):
    """Steps an engine while it has requests. Its methods may be called from any thread."""

    def __init__(self, engine: Engine):
        super().__init__(name="engine", daemon=True)
        self.engine, self.calls, self.listeners = engine, SimpleQueue(), {}
        self.lock, self.ended = threading.Lock(), False

    def submit(self, request: Request, deliver: Deliver) -> None:
        with self.lock:
            if not self.ended:
                self.calls.put((self._begin, request, deliver))
                return
        deliver(None, True)

    def cancel(self, request: Request) -> None:
        """End a request; nothing is delivered for it from the next step on."""
        self.calls.put((self._end, request))

    def stop(self) -> None:
        """End the thread after its step."""
        self.calls.put(None)

    def run(self) -> None:
        try:
            while self._take_calls():
                served = [*self.engine.running, *self.engine.waiting]
                before = {request: len(request.output) for request in served}
                self.engine.step()
                self.engine.steps.clear()
                running = set(self.engine.running)
                for request, count in before.items():
                    for token in request.output[count:]:
                        self._deliver(request, token, request not in running)
        finally:
            # After an error too. No request comes behind the lock, and those that came before it hear of the end.
            with self.lock:
                self.ended = True
            while not self.calls.empty():
                self._make(self.calls.get())
            for deliver in self.listeners.values():
                deliver(None, True)

    def _take_calls(self) -> bool:
        """Make the calls that wait, or wait for one where there is nothing to do; False to stop."""
        while True:
            try:
                call = self.calls.get(block=not (self.engine.running or self.engine.waiting))
            except Empty:
                return True
            if call is None:
                return False
            self._make(call)

    def _make(self, call: tuple | None) -> None:
        if call is not None:
            function, *arguments = call
            function(*arguments)

    def _begin(self, request: Request, deliver: Deliver) -> None:
        self.listeners[request] = deliver
        self.engine.waiting.append(request)

    def _end(self, request: Request) -> None:
        self.listeners.pop(request, None)
        self.engine.cancel(request)

    def _deliver(self, request: Request, token: int, last: bool) -> None:
        self.listeners[request](token, last)
        if last:
            del self.listeners[request]
