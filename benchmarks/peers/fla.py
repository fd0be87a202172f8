"""flash-linear-attention: gated delta rules with a decay a head (GDN) or a key channel (KDA), in Triton."""

import peer_fla as peer


def gdn_chunk(given: dict) -> dict:
    """Logarithms of decays are given, as they are to ours; the last state is returned with V first, as ours."""

    def run():
        return peer.chunk_gated_delta_rule(
            given["q"], given["k"], given["v"], given["log_decay"], given["beta"], output_final_state=True,
            use_qk_l2norm_in_kernel=True, state_v_first=True,
        )  # fmt: skip

    return {"chunk": run}


def gdn_step(given: dict) -> dict:
    """It writes the new state beside the old one."""

    def run():
        return peer.fused_recurrent_gated_delta_rule(
            given["q"], given["k"], given["v"], given["raw"], beta=given["raw_beta"], initial_state=given["state"],
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=given["a_log"],
            dt_bias=given["dt_bias"], use_beta_sigmoid_in_kernel=True, state_v_first=True,
        )  # fmt: skip

    return {"recurrent, gates inside": run}


def kda_chunk(given: dict) -> dict:
    def run():
        return peer.chunk_kda(
            given["q"], given["k"], given["v"], given["gate"], given["beta"], output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
            lower_bound=given["bound"], A_log=given["a_log"], dt_bias=given["dt_bias"].flatten(), state_v_first=True,
        )  # fmt: skip

    return {"chunk, gates inside": run}


PROBLEMS = {"gdn chunk": gdn_chunk, "gdn step": gdn_step, "kda chunk": kda_chunk}
