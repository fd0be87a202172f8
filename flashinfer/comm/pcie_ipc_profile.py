"""How the GPUs of a group reach each other, by upstream's names for that."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import torch

from flashinfer._core.checks import require
from flashinfer.ops.comm.meeting import Ranks

# Upstream's words for GPUs behind one switch and for others, and what it takes for them.
PROFILES = "pcieswitch-pairs", "rootcplx-noswitch"
_NAMES = {"pcieswitch": PROFILES[0], "rootcplx": PROFILES[1]} | {name: name for name in PROFILES}


@dataclass(frozen=True)
class PcieIpcRankTopology:
    """A rank's GPU, and which others it reaches.

    Attributes
    ----------
    rank : int
    hostname : str
    device_index : int
        -1 without a GPU.
    device_uuid : str
        '' without a GPU.
    peers : dict of str to bool
        By UUID, whether the driver lets it reach that GPU.
    """

    rank: int
    hostname: str = ""
    device_index: int = -1
    device_uuid: str = ""
    peers: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class PcieIpcProfileDecision:
    """A profile, and why.

    Attributes
    ----------
    profile : str
        One of `PROFILES`.
    reason : str
        Why.
    """

    profile: str
    reason: str


def probe_pcie_ipc_rank_topology(rank: int, device: torch.device | None = None) -> PcieIpcRankTopology:
    """What the driver says of this rank's GPU and of those it sees. It asks no other rank.

    Parameters
    ----------
    rank : int
        This rank.
    device : torch.device, optional
        Its GPU; by default the current one.

    Returns
    -------
    PcieIpcRankTopology
        Without a GPU, its rank and host alone.

    Raises
    ------
    RuntimeError
        torch's own, of a device that is not there.

    Examples
    --------
    >>> from flashinfer.comm.pcie_ipc import probe_pcie_ipc_rank_topology
    >>> probe_pcie_ipc_rank_topology(0).rank
    0
    """
    host = socket.gethostname()
    if not torch.cuda.is_available():
        return PcieIpcRankTopology(rank, host)
    index = torch.device("cuda" if device is None else device).index
    index = torch.cuda.current_device() if index is None else index
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    peers = {
        uuid: torch.cuda.can_device_access_peer(index, i) for i, uuid in enumerate(uuids) if i != index
    }  # fmt: skip
    return PcieIpcRankTopology(rank, host, index, uuids[index], peers)


def resolve_pcie_ipc_profile(
    group, requested: str | None = None, device: torch.device | None = None
) -> PcieIpcProfileDecision:
    """Agree on a profile. A collective call, with the same answer on every rank.

    Parameters
    ----------
    group : ProcessGroup
    requested : str, optional
        "pcieswitch-pairs" or "rootcplx-noswitch", the same on every rank; it is the answer then. "pcieswitch" and
        "rootcplx" are short for them, in letters of either case.
    device : torch.device, optional
        This rank's; by default the current one.

    Returns
    -------
    PcieIpcProfileDecision
        The profile, and why.

    Raises
    ------
    ValueError
        Another profile, or ranks that ask for different ones.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """
    ranks = Ranks(group)
    mine = probe_pcie_ipc_rank_topology(ranks.rank, device)
    everyone = ranks.gather((requested, mine.device_uuid, mine.peers))
    asked = {each[0] for each in everyone}
    require(len(asked) == 1, "requested", sorted(map(str, asked)), "the same on every rank")
    if requested is not None:
        name = str(requested).strip().lower()
        require(name in _NAMES, "requested", repr(requested), ", ".join(map(repr, _NAMES)))
        return PcieIpcProfileDecision(_NAMES[name], "requested")
    uuids = [each[1] for each in everyone]
    reached = all(peers.get(uuid, False) for _, own, peers in everyone for uuid in uuids if uuid != own)
    if reached and all(uuids):
        return PcieIpcProfileDecision(PROFILES[0], "every GPU may reach every other")
    return PcieIpcProfileDecision(PROFILES[1], "a GPU may not reach another, or there is none")
