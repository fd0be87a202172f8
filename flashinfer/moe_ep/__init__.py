"""Expert parallelism as engines ask for it: an object that sends tokens to the ranks of their experts, and brings back
what the experts made of them."""

from flashinfer.moe_ep.backend import MoEEpCommunication, MoEEpDispatchResult
from flashinfer.moe_ep.communication import (
    NVLinkOneSidedAlltoAll,
    available_communication_backends,
    create_communication,
)
from flashinfer.moe_ep.config import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig

__all__ = [
    "BootstrapConfig",
    "MoEEpCommParams",
    "MoEEpCommunication",
    "MoEEpDispatchResult",
    "NVLinkOneSidedAlltoAll",
    "NVLinkOneSidedConfig",
    "available_communication_backends",
    "create_communication",
]
