"""One packed library, beside our rows: the process that `flashinfer.testing.interleaved` starts.

`packed.py ADAPTER DEVICE`, with the library's folder and this repository on PYTHONPATH. An adapter, a file of `peers/`,
has `PROBLEMS`: the problem of a `Case` -> a function of `Work.given`, which gives each way through the library, by
name, as a function without arguments. Its result is that of the row, and has to pass the row's own check.

To stdout, a JSON document a line: {"takes"} or {"error"} first, then an answer to each request on stdin: "prepare" (of
"module" and "row": build, run and check each way) -> {"ways": name -> {} or {"error"}}; "time" ("way",
"milliseconds") -> {"us": [...], "driven"} or {"error"}; "drop" lets go of the row; "retune" forgets what autotuners
chose while others ran. An answer after which the process ends has "last".
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import sys
from pathlib import Path

import torch

from flashinfer.testing import bench
from flashinfer.testing.interleaved import Sampler

# Milliseconds that an autotuner of Triton spends on each of its choices.
_TUNING = dict(warmup=3, rep=12)


class Served:
    """The row that is prepared, and what is done with it."""

    def __init__(self, problems: dict, device: torch.device):
        self.problems, self.device = problems, device
        self.modules: dict[str, dict] = {}
        self.calls: dict = {}
        self.samplers: dict[str, Sampler] = {}

    def prepare(self, module: str, row: str) -> dict:
        self.drop()
        if module not in self.modules:
            self.modules[module] = {case.name: case for case in bench.load(Path(module))["cases"](self.device)}
        case, ways = self.modules[module][row], {}
        torch.manual_seed(0)
        work = case.make(self.device)
        self.calls = self.problems[case.problem](work.given)
        for name, call in self.calls.items():
            try:
                result = call()
                if work.check is not None:
                    work.check(result)
                ways[name] = {}
            except Exception as error:
                ways[name] = bench.failed(error)
        return {"ways": ways}

    def time(self, way: str, milliseconds: float) -> dict:
        if way not in self.calls:
            raise RuntimeError("its process ended in another way of this row")
        if way not in self.samplers:
            self.samplers[way] = Sampler(self.calls[way], self.device)
        sampler = self.samplers[way]
        return {"us": sampler(milliseconds), "driven": sampler.driven}

    def drop(self) -> dict:
        self.calls, self.samplers = {}, {}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def retune(self) -> dict:
        from triton.runtime.autotuner import Autotuner

        for tuner in [x for x in gc.get_objects() if isinstance(x, Autotuner)]:
            tuner.cache.clear()
        return {}


def answer(served: Served, do: str, **request) -> dict:
    try:
        return getattr(served, do)(**request)
    except Exception as error:
        failed = bench.failed(error)
        return {"ways": {"": failed}} if do == "prepare" else failed


def sound(device: torch.device) -> bool:
    """Whether the device has had no fault in this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return True
    except Exception:
        return False


def main(adapter: str, device: torch.device, requests, tell) -> None:
    try:
        import triton

        triton.testing.do_bench = functools.partial(triton.testing.do_bench, **_TUNING)
        served = Served(runpy.run_path(adapter)["PROBLEMS"], device)
    except Exception as error:
        return tell(bench.failed(error))
    tell({"takes": list(served.problems)})
    for line in requests:
        document = answer(served, **json.loads(line))
        if not sound(device):
            # so that the next row has another process
            return tell(document | {"last": True})
        tell(document)


if __name__ == "__main__":
    # what the library and its compilers print is not part of the answer
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with torch.no_grad():
        main(
            sys.argv[1], torch.device(sys.argv[2]), sys.stdin,
            lambda document: print(json.dumps(document), file=answers, flush=True),
        )  # fmt: skip
