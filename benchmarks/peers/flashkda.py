"""FlashKDA: prefill of Kimi delta attention with a bounded gate."""

import peer_flashkda as peer


def kda_chunk(given: dict) -> dict:
    """Gates and betas raw. Its last state is written, and not compared: the layout of its rows is its own."""
    q, k, v, gate, beta = (given[name] for name in ("q", "k", "v", "gate", "beta"))
    ends = given["ends"].long()

    def run():
        out, _ = peer.flashkda(q, k, v, gate, beta, given["a_log"], given["dt_bias"], given["bound"], ends)
        return out, None

    return {"": run}


PROBLEMS = {"kda chunk": kda_chunk}
