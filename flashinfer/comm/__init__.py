"""Collectives between GPUs for tensor- and expert-parallel serving."""

from flashinfer.comm.allreduce import (
    AllReduceFusionWorkspace,
    MNNVLAllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from flashinfer.comm.comm_backend import CommBackend, TorchDistBackend
from flashinfer.comm.dcp_alltoall import (
    decode_cp_a2a_allocate_mnnvl_workspace,
    decode_cp_a2a_alltoall,
    decode_cp_a2a_init_workspace,
)
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import (
    McastGPUBuffer,
    MnnvlConfig,
    all_ranks_agree,
    is_mnnvl_fabric_supported,
    is_multicast_supported,
)
from flashinfer.comm.trtllm_alltoall import MnnvlMoe, MoEAlltoallInfo
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern, QuantizationSFLayout
from flashinfer.comm.trtllm_moe_alltoall import (
    MoeAlltoAll,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
    moe_a2a_sanitize_expert_ids,
    moe_a2a_wrap_payload_tensor_in_workspace,
)
from flashinfer.ops.comm.capability import Capability, probe
from flashinfer.ops.comm.meeting import set_setup_deadline

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "Capability",
    "CommBackend",
    "MNNVLAllReduceFusionWorkspace",
    "Mapping",
    "McastGPUBuffer",
    "MnnvlConfig",
    "MnnvlMoe",
    "MoEAlltoallInfo",
    "MoeAlltoAll",
    "QuantizationSFLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "TorchDistBackend",
    "all_ranks_agree",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "decode_cp_a2a_allocate_mnnvl_workspace",
    "decode_cp_a2a_alltoall",
    "decode_cp_a2a_init_workspace",
    "is_mnnvl_fabric_supported",
    "is_multicast_supported",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
    "probe",
    "set_setup_deadline",
]
