"""Times what happens once in a process: the import, the first decode, then the first prefill. Prints microseconds as
JSON.

    python first_call.py DEVICE
"""

import json
import sys
import time

import torch


def since(start: float) -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def main(device: torch.device) -> dict[str, float]:
    start = time.perf_counter()
    import flashinfer

    wrappers = flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithRaggedKVCacheWrapper
    times = {"import": since(start)}
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    decode, prefill = (wrapper(workspace, "NHD") for wrapper in wrappers)
    settings = dict(dtype=torch.bfloat16, device=device)
    q, cache = torch.randn(1, 32, 128, **settings), torch.randn(4, 2, 16, 8, 128, **settings)
    rows = torch.randn(64, 32, 128, **settings), *torch.randn(2, 64, 8, 128, **settings)
    indptr, indices = torch.tensor([0, 4], dtype=torch.int32), torch.arange(4, dtype=torch.int32, device=device)
    last, rows_indptr = torch.tensor([16], dtype=torch.int32), torch.tensor([0, 64], dtype=torch.int32)

    start = time.perf_counter()
    decode.plan(indptr, indices, last, 32, 8, 128, 16, q_data_type=torch.bfloat16)
    decode.run(q, cache)
    times["decode"] = since(start)

    start = time.perf_counter()
    prefill.plan(rows_indptr, rows_indptr, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)
    prefill.run(*rows)
    times["prefill"] = since(start)
    return times


if __name__ == "__main__":
    print(json.dumps(main(torch.device(sys.argv[1]))))
