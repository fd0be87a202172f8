"""Chooses the transport of a group's ranks: peer memory where a probe shows that it works, else the process group."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from flashinfer._core.target import target_of
from flashinfer.ops.comm import symmetric
from flashinfer.ops.comm.collective import Collective
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.symmetric import Link

# Seconds that the probe waits for a word from a peer.
PROBE_DEADLINE = 2.0

_refused = ""


@dataclass(frozen=True)
class Capability:
    """The transport between the ranks of a group.

    Attributes
    ----------
    transport : str
        "peer" if every rank can write, signal and read in every other's memory; else "collective".
    means : str
        How memory is shared ("symmetric memory", "CUDA IPC"), or the process group's backend ("gloo", "NCCL").
    reason : str
        Why the transport is not peer memory; '' if it is.
    pairs : tuple of tuple of bool
        For each pair of ranks, whether the probe's words arrived in both directions; () without a probe.
    """

    transport: str
    means: str
    reason: str = ""
    pairs: tuple[tuple[bool, ...], ...] = ()


@contextlib.contextmanager
def without_peer_access(reason: str = "refused by an override"):
    """A context in which `connect` uses the process group, as if ranks had no access to each other's memory."""
    global _refused
    before, _refused = _refused, reason
    try:
        yield
    finally:
        _refused = before


def connect(
    ranks: Ranks, area: int, device: torch.device, behind: int = 0, deadline: float = 0
) -> tuple[Link | Collective, Capability]:
    """The transport of `ranks`, and why it was chosen. A collective call; the choice is the same on every rank.

    Parameters
    ----------
    ranks : Ranks
    area : int
        The most bytes that one rank sends to one channel in one exchange.
    device : torch.device
    behind : int
        Bytes of peer memory behind the slots.
    deadline : float
        The longest wait in seconds; 0 for the default.

    Raises
    ------
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """
    ranks.meet("set-up")
    reason = "tensors are on the CPU" if device.type != "cuda" else _refused
    reason = next((r for r in ranks.gather(reason) if r), "")
    if not reason and ranks.size > symmetric.MOST_RANKS:
        reason = f"{ranks.size} ranks, more than the {symmetric.MOST_RANKS} that flags have room for"
    pairs = ()
    if not reason:
        try:
            memory = symmetric.allocate(ranks, symmetric.header(ranks.size, area) + behind, device)
        except RuntimeError as error:
            reason = str(error)
        else:
            link = Link(ranks, memory, area, deadline=deadline)
            pairs, reason = _probe(link)
            if not reason:
                return link, Capability("peer", memory.means, "", pairs)
            link.close()
    collective = Collective(ranks, device, reason, deadline)
    means = "gloo" if device.type != "cuda" or collective.staged else "NCCL"
    return collective, Capability("collective", means if ranks.size > 1 else "nothing to send", reason, pairs)


def probe(group=None, device: torch.device | None = None, backend=None) -> Capability:
    """Find the transport between the ranks of `group`; the probe itself waits up to 2 s. A collective call.

    Parameters
    ----------
    group : ProcessGroup, optional
        The ranks; a single one without.
    device : torch.device, optional
        This rank's; by default the current CUDA device, or the CPU where there is none.
    backend : object with CommBackend's methods, optional
        In place of `group`.

    Returns
    -------
    Capability
        What works, and why no more does.

    Raises
    ------
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    link, capability = connect(Ranks(group, backend), 16, device)
    link.close()
    return capability


def _probe(link: Link) -> tuple[tuple, str]:
    """`Capability.pairs`, and an error message for the first pair that failed, or ''."""
    if link.world == 1:
        return ((True,),), ""
    from flashinfer.ops.comm._device import probe

    problem = probe.Problem(link.world, target_of(link.device).capability)
    # Compile first, so that compilation does not count towards the deadline.
    probe.launch.prepare(problem, None, link.device)
    link.ranks.barrier()
    seen = torch.zeros(link.world, dtype=torch.int32, device=link.device)
    deadline, link.deadline = link.deadline, PROBE_DEADLINE
    probe.launch(problem, None, (1, 1, 1), seen, *link.arguments)
    torch.cuda.synchronize(link.device)
    link.deadline = deadline
    good = link.ranks.gather([bool(x) for x in seen.tolist()])
    pairs = tuple(
        tuple(good[a][b] and good[b][a] for b in range(link.world)) for a in range(link.world)
    )  # fmt: skip
    broken = [(a, b) for a in range(link.world) for b in range(a) if not pairs[a][b]]
    if not broken:
        return pairs, ""
    return pairs, f"a word written to peer memory did not arrive between ranks {broken[0][1]} and {broken[0][0]}"
