"""Collectives between GPUs for tensor- and expert-parallel serving."""

from flashinfer.comm.allreduce import (
    AllReduceFusionWorkspace,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from flashinfer.comm.comm_backend import CommBackend, TorchDistBackend
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import (
    McastGPUBuffer,
    MnnvlConfig,
    all_ranks_agree,
    is_mnnvl_fabric_supported,
    is_multicast_supported,
)
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern, QuantizationSFLayout
from flashinfer.ops.comm.capability import Capability, probe

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "Capability",
    "CommBackend",
    "Mapping",
    "McastGPUBuffer",
    "MnnvlConfig",
    "QuantizationSFLayout",
    "TorchDistBackend",
    "all_ranks_agree",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "is_mnnvl_fabric_supported",
    "is_multicast_supported",
    "probe",
]
