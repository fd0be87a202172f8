"""Which ranks of a Ulysses group reach each other's memory, and so which way their exchanges go."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flashinfer._core.checks import require
from flashinfer.ops.comm.meeting import Ranks

ULYSSES_BACKENDS = "auto", "nvlink", "nccl"
SUPPORTED_WORLD_SIZES = 2, 4, 6, 8


class UlyssesBackendError(RuntimeError):
    """Peers' memory was asked for, and cannot be used."""


@dataclass
class UlyssesRankTopology:
    """A rank's GPU, and which others it reaches.

    Attributes
    ----------
    rank : int
    hostname : str
    device_index : int
        -1 without a GPU.
    device_uuid, pci_bus_id : str
        '' without a GPU.
    peer_p2p, peer_nvlink : dict of str to bool
        By UUID, whether it reaches that GPU, and by NVLink.
    pair_errors : dict of str to str
        By UUID, what could not be found out.
    probe_error : str, optional
        Why nothing could be found out; None if something could.
    """

    rank: int
    hostname: str = ""
    device_index: int = -1
    device_uuid: str = ""
    pci_bus_id: str = ""
    peer_p2p: dict[str, bool] = field(default_factory=dict)
    peer_nvlink: dict[str, bool] = field(default_factory=dict)
    pair_errors: dict[str, str] = field(default_factory=dict)
    probe_error: str | None = None


@dataclass(frozen=True)
class UlyssesBackendDecision:
    """A backend, and why.

    Attributes
    ----------
    backend : str
        "nvlink" (peers' memory) or "nccl" (the process group).
    reason : str
        Why.
    """

    backend: str
    reason: str


def probe_ulysses_rank_topology(device: torch.device | str | int | None, rank: int) -> UlyssesRankTopology:
    """What the driver says of this rank's GPU and of those it sees. It asks no other rank.

    That two GPUs reach each other is all that is asked: `peer_nvlink` is `peer_p2p`.

    Parameters
    ----------
    device : torch.device, str or int, optional
        This rank's GPU; the current one for None.
    rank : int
        This rank.

    Returns
    -------
    UlyssesRankTopology
        Without such a GPU, its rank and host, and the error that says so: nothing is raised.
    """
    host = socket.gethostname()
    if not torch.cuda.is_available():
        return UlyssesRankTopology(rank, host, probe_error="no GPU")
    try:
        index = torch.device("cuda" if device is None else device).index
        index = torch.cuda.current_device() if index is None else index
        every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, TypeError) as error:
        return UlyssesRankTopology(rank, host, probe_error=f"device {device!r}: {error}")
    if index >= len(every):
        return UlyssesRankTopology(rank, host, probe_error=f"device {device!r}: there are {len(every)} GPUs")
    peers = {
        str(p.uuid): torch.cuda.can_device_access_peer(index, i) for i, p in enumerate(every) if i != index
    }  # fmt: skip
    return UlyssesRankTopology(rank, host, index, str(every[index].uuid), "", peers, dict(peers))


def decide_ulysses_backend(
    requested: str,
    topologies: list[UlyssesRankTopology],
    supported_world_sizes: Sequence[int] = SUPPORTED_WORLD_SIZES,
) -> UlyssesBackendDecision:
    """What ranks with these GPUs should use: a function of its arguments alone.

    Parameters
    ----------
    requested : str
        "auto", "nvlink" or "nccl".
    topologies : list of UlyssesRankTopology
        Of every rank, in any order.
    supported_world_sizes : sequence of int
        Numbers of ranks that "nvlink" takes.

    Returns
    -------
    UlyssesBackendDecision
        "nvlink" or "nccl", and why.

    Raises
    ------
    ValueError
        `requested` is none of "auto", "nvlink" and "nccl".
    UlyssesBackendError
        "nvlink" is asked for and cannot be.
    """
    require(requested in ULYSSES_BACKENDS, "requested", repr(requested), ", ".join(map(repr, ULYSSES_BACKENDS)))
    require(isinstance(topologies, (list, tuple)), "topologies", repr(topologies), "a list of UlyssesRankTopology")
    if requested == "nccl":
        return UlyssesBackendDecision("nccl", "requested")
    reason = _obstacle(topologies, supported_world_sizes)
    if not reason:
        return UlyssesBackendDecision("nvlink", "every GPU reaches every other")
    if requested == "nvlink":
        raise UlyssesBackendError(f"backend 'nvlink': {reason}")
    return UlyssesBackendDecision("nccl", reason)


def _obstacle(topologies: Sequence[UlyssesRankTopology], sizes: Sequence[int]) -> str:
    """Why ranks with these GPUs do not reach each other's memory, or ''."""
    ranks = sorted(topologies, key=lambda t: t.rank)
    if [t.rank for t in ranks] != list(range(len(ranks))):
        return f"ranks {[t.rank for t in topologies]} are not 0 to {len(ranks) - 1}, once each"
    for t in ranks:
        if t.probe_error is not None:
            return f"the probe of rank {t.rank} failed: {t.probe_error}"
    if len(ranks) not in sizes:
        return f"world size {len(ranks)}; allowed: {', '.join(map(str, sizes))}"
    hosts = sorted({t.hostname for t in ranks})
    if len(hosts) > 1:
        return f"ranks are on multiple hosts: {', '.join(hosts)}"
    for t in ranks:
        if not t.device_uuid:
            return f"the GPU of rank {t.rank} is unknown"
        for other in ranks:
            if other.rank == t.rank:
                continue
            if other.device_uuid == t.device_uuid:
                return f"ranks {t.rank} and {other.rank} have the same GPU {t.device_uuid}"
            for link, reached in (("P2P", t.peer_p2p), ("NVLink", t.peer_nvlink)):
                if not reached.get(other.device_uuid, False):
                    why = t.pair_errors.get(other.device_uuid)
                    return f"no {link} from rank {t.rank} to rank {other.rank}" + (f": {why}" if why else "")
    return ""


def resolve_ulysses_backend(
    backend: str = "auto", group=None, device: torch.device | str | int | None = None
) -> UlyssesBackendDecision:
    """`decide_ulysses_backend` of every rank's request and GPU. A collective call, with one answer on every rank.

    Parameters
    ----------
    backend : str
        "auto", "nvlink" or "nccl", the same on every rank.
    group : ProcessGroup, optional
        The default group, if None.
    device : torch.device, str or int, optional
        This rank's GPU; the current one for None.

    Returns
    -------
    UlyssesBackendDecision
        The same on every rank.

    Raises
    ------
    ValueError
        A request other than the three, or other than another rank's.
    UlyssesBackendError
        As `decide_ulysses_backend` raises it, on every rank.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """
    group = torch.distributed.group.WORLD if group is None else group
    ranks = Ranks(group)
    mine = probe_ulysses_rank_topology(device, ranks.rank)
    said = (backend, mine.hostname, mine.device_index, mine.device_uuid, mine.peer_p2p, mine.probe_error)
    everyone = ranks.gather(said)
    asked = {each[0] for each in everyone}
    require(len(asked) == 1, "backend", sorted(asked), "the same on every rank")
    topologies = [
        UlyssesRankTopology(rank, host, index, uuid, "", peers, peers, {}, error)
        for rank, (_, host, index, uuid, peers, error) in enumerate(everyone)
    ]
    return decide_ulysses_backend(backend, topologies)
