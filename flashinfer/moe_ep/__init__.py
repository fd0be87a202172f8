"""Expert parallelism as engines ask for it: an object that sends tokens to the ranks of their experts, and brings back
what the experts made of them; and a whole layer of experts over ranks."""

from flashinfer.moe_ep.backend import MoEEpCommunication, MoEEpDispatchResult
from flashinfer.moe_ep.communication import (
    NVLinkOneSidedAlltoAll,
    available_communication_backends,
    create_communication,
)
from flashinfer.moe_ep.config import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig
from flashinfer.moe_ep.mega_config import Bf16MegaMoeConfig, FleetParams, Fp8MegaMoeConfig, MegaConfig
from flashinfer.moe_ep.mega_layer import MoEEpMegaLayer
from flashinfer.moe_ep.mega_workspace import MoEEpMegaWorkspace
from flashinfer.moe_ep.tensors import MoEEpTensors, MoEWeightPack

__all__ = [
    "Bf16MegaMoeConfig",
    "BootstrapConfig",
    "FleetParams",
    "Fp8MegaMoeConfig",
    "MegaConfig",
    "MoEEpCommParams",
    "MoEEpCommunication",
    "MoEEpDispatchResult",
    "MoEEpMegaLayer",
    "MoEEpMegaWorkspace",
    "MoEEpTensors",
    "MoEWeightPack",
    "NVLinkOneSidedAlltoAll",
    "NVLinkOneSidedConfig",
    "available_communication_backends",
    "create_communication",
]
