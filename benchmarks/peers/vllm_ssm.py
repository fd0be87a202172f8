"""vLLM's Triton kernels for Mamba2: chunked scan (SSD) and state update (SSU)."""

import peer_vllm_ssm as peer


def ssd(given: dict) -> dict:
    """In chunks of 128 and of 256, which models ask for; the plan of chunks is made before."""
    x, dt, b, c = (given[name].flatten(0, 1) for name in ("x", "dt", "b", "c"))
    sequences, tokens = given["x"].shape[:2]
    lengths, more = [tokens] * sequences, {"d": given["d"], "dt_bias": given["dt_bias"]}

    def way(chunk):
        plan = peer.ssd_plan(lengths, chunk, x.device)
        return lambda: peer.ssd(x, dt, given["a"], b, c, lengths, chunk, plan=plan, **more)

    return {f"chunk {chunk}": way(chunk) for chunk in (128, 256)}


def ssu(given: dict) -> dict:
    out = given["x"].new_empty(given["x"].shape)
    names = ("state", "x", "dt", "a", "b", "c", "d", "dt_bias")

    def run():
        y = peer.ssu(*(given[name] for name in names), slots=given["slots"], out=out)
        return y, given["state"][1:]

    return {"": run}


PROBLEMS = {"ssd chunk": ssd, "ssu step": ssu}
