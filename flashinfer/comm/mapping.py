"""Which rank of a job does what: tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require


class Mapping:
    """The place of one rank in a job of ``world_size = tp_size * pp_size * cp_size`` ranks.

    Ranks are numbered with tensor parallelism innermost, context parallelism next and pipeline stages outermost. Inside
    a tensor-parallel group, mixture-of-experts layers split again: expert parallelism innermost, then clusters, then
    tensor parallelism of an expert.

    Parameters
    ----------
    world_size, rank : int
    gpus_per_node : int or callable
        A number, or a function that returns one, as vLLM gives `torch.accelerator.device_count`; at least 1 then.
    cp_size, tp_size, pp_size : int
        Ranks that share a sequence, a layer, and the layers.
    cp_config : dict, optional
        Kept as given.
    moe_cluster_size, moe_tp_size, moe_ep_size : int
        Their product is `tp_size`. -1: clusters of 1; what is not said is split by tensor parallelism.
    attn_tp_size, attn_cp_size : int
        Of the attention layers; their product is ``tp_size * cp_size``. With one given the other follows; with none,
        heads are split over all of these ranks, as Ulysses does, and attn_cp_size is 1.
    auto_parallel : bool
        The split is not known yet: tp_size, pp_size and cp_size are 1, whatever world_size is, and each rank is 0 in
        its groups.
    enable_attention_dp : bool
        Kept as given.

    Raises
    ------
    ValueError
        Sizes that do not multiply to `world_size`, or other ones than 1 with `auto_parallel`; a rank outside the world.

    Examples
    --------
    >>> from flashinfer.comm import Mapping
    >>> mapping = Mapping(world_size=4, rank=3, tp_size=2, pp_size=2)
    >>> mapping.tp_rank, mapping.pp_rank, mapping.tp_group, mapping.pp_layers(5)
    (1, 1, [2, 3], [3, 4])
    """

    @checked
    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int | Callable[[], int] = 8,
        *,
        cp_size: int = 1,
        cp_config: dict | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ):
        gpus_per_node = max(gpus_per_node(), 1) if callable(gpus_per_node) else gpus_per_node
        require(isinstance(gpus_per_node, int), "gpus_per_node", repr(gpus_per_node), "an integer")
        sizes = dict(cp_size=cp_size, tp_size=tp_size, pp_size=pp_size, gpus_per_node=gpus_per_node)
        unset = dict(moe_cluster_size=moe_cluster_size, moe_tp_size=moe_tp_size, moe_ep_size=moe_ep_size,
                     attn_tp_size=attn_tp_size, attn_cp_size=attn_cp_size)  # fmt: skip
        for name, size in (sizes | unset).items():
            require(size > 0 or size == -1 and name in unset, name, size, "1 or more")
        moe_cluster_size = 1 if moe_cluster_size == -1 else moe_cluster_size
        if moe_tp_size == -1:
            moe_tp_size = tp_size // (max(moe_ep_size, 1) * moe_cluster_size)
        if moe_ep_size == -1:
            moe_ep_size = tp_size // (max(moe_tp_size, 1) * moe_cluster_size)
        if attn_tp_size == -1:
            attn_tp_size = tp_size * cp_size // (1 if attn_cp_size == -1 else attn_cp_size)
        if attn_cp_size == -1:
            attn_cp_size = tp_size * cp_size // attn_tp_size
        self.world_size, self.gpus_per_node = world_size, gpus_per_node
        self.cp_size, self.tp_size, self.pp_size = cp_size, tp_size, pp_size
        self.moe_cluster_size, self.moe_tp_size, self.moe_ep_size = moe_cluster_size, moe_tp_size, moe_ep_size
        self.attn_tp_size, self.attn_cp_size = attn_tp_size, attn_cp_size
        self.cp_config = {} if cp_config is None else cp_config
        self.auto_parallel, self.enable_attention_dp = auto_parallel, enable_attention_dp
        product = tp_size * pp_size * cp_size
        if auto_parallel:
            for name, size in (("tp_size", tp_size), ("pp_size", pp_size), ("cp_size", cp_size)):
                require(size == 1, name, size, "1, with auto_parallel")
        else:
            require(product == world_size, "world_size", world_size, f"{product}: tp_size * pp_size * cp_size")
        experts = moe_tp_size * moe_ep_size * moe_cluster_size
        require(experts == tp_size, "moe_tp_size * moe_ep_size * moe_cluster_size", experts, f"{tp_size}, the tp_size")
        attention = attn_tp_size * attn_cp_size
        require(attention == tp_size * cp_size, "attn_tp_size * attn_cp_size", attention, f"{tp_size * cp_size}")
        self.rank = rank

    def __eq__(self, other) -> bool:
        return isinstance(other, Mapping) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(value for value in self.to_dict().values() if not isinstance(value, dict)))

    @property
    def rank(self) -> int:
        """This rank in the job; may be set, to 0 ... world_size - 1."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        require(isinstance(rank, int) and 0 <= rank < self.world_size, "rank", rank, f"0 to {self.world_size - 1}")
        self._rank = rank

    @property
    def _place(self) -> int:
        """This rank in a split that is known."""
        return 0 if self.auto_parallel else self.rank

    @property
    def tp_rank(self) -> int:
        """This rank's place in its tensor-parallel group."""
        return self._place % self.tp_size

    @property
    def cp_rank(self) -> int:
        """This rank's place in its context-parallel group."""
        return self._place // self.tp_size % self.cp_size

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline stage."""
        return self._place // (self.tp_size * self.cp_size)

    @property
    def moe_ep_rank(self) -> int:
        """This rank's place in its expert-parallel group."""
        return self.tp_rank % self.moe_ep_size

    @property
    def moe_cluster_rank(self) -> int:
        """This rank's place in its group of clusters."""
        return self.tp_rank // self.moe_ep_size % self.moe_cluster_size

    @property
    def moe_tp_rank(self) -> int:
        """This rank's place among those that share an expert."""
        return self.tp_rank // (self.moe_ep_size * self.moe_cluster_size)

    @property
    def tp_groups(self) -> list[list[int]]:
        """The ranks of each tensor-parallel group, groups in the order of their first ranks; so are the others."""
        return self._split(1, self.tp_size)

    @property
    def cp_groups(self) -> list[list[int]]:
        """The ranks of each context-parallel group."""
        return self._split(self.tp_size, self.cp_size)

    @property
    def pp_groups(self) -> list[list[int]]:
        """The ranks of each pipeline, one of each stage; with `auto_parallel` all ranks."""
        stride = self.tp_size * self.cp_size
        return self._split(stride, self.world_size // stride)

    @property
    def moe_ep_groups(self) -> list[list[int]]:
        """The ranks of each expert-parallel group."""
        return self._split(1, self.moe_ep_size)

    @property
    def moe_cluster_groups(self) -> list[list[int]]:
        """The ranks of each group of clusters."""
        return self._split(self.moe_ep_size, self.moe_cluster_size)

    @property
    def moe_tp_groups(self) -> list[list[int]]:
        """The ranks of each group that shares experts."""
        stride = self.moe_ep_size * self.moe_cluster_size
        return self._split(stride, self.moe_tp_size)

    @property
    def tp_group(self) -> list[int]:
        """The ranks that share this rank's layers and context."""
        return self._own(self.tp_groups)

    @property
    def cp_group(self) -> list[int]:
        """The ranks that share this rank's layers and tensor shard, for context parallelism."""
        return self._own(self.cp_groups)

    @property
    def pp_group(self) -> list[int]:
        """The ranks in this one's place, one of each pipeline stage."""
        return self._own(self.pp_groups)

    @property
    def moe_ep_group(self) -> list[int]:
        """The ranks that hold this one's experts and the others', in expert-parallel order."""
        return self._own(self.moe_ep_groups)

    @property
    def moe_cluster_group(self) -> list[int]:
        """The ranks in this one's place, one of each cluster."""
        return self._own(self.moe_cluster_groups)

    @property
    def moe_tp_group(self) -> list[int]:
        """The ranks that share this rank's experts."""
        return self._own(self.moe_tp_groups)

    def _split(self, stride: int, size: int) -> list[list[int]]:
        """Groups of ranks that differ in the place that has this stride and size."""
        known = range(self.tp_size * self.pp_size * self.cp_size)
        firsts = (rank for rank in known if rank // stride % size == 0)
        return [[first + i * stride for i in range(size)] for first in firsts]

    def _own(self, groups: list[list[int]]) -> list[int]:
        return next(group for group in groups if self._place in group)

    @property
    def node_rank(self) -> int:
        """The node that this rank is on."""
        return self.get_node_rank(self.rank)

    @property
    def local_rank(self) -> int:
        """This rank's place on its node."""
        return self.get_local_rank(self.rank)

    @checked
    def get_node_rank(self, rank: int) -> int:
        """The node of a rank.

        Parameters
        ----------
        rank : int
            Of the job; not checked against world_size.

        Returns
        -------
        int
        """
        return rank // self.gpus_per_node

    @checked
    def get_local_rank(self, rank: int) -> int:
        """The place of a rank on its node.

        Parameters
        ----------
        rank : int
            Of the job; not checked against world_size.

        Returns
        -------
        int
            0 to gpus_per_node - 1.
        """
        return rank % self.gpus_per_node

    def is_multi_node(self) -> bool:
        """Whether the job spans several nodes.

        Returns
        -------
        bool
        """
        return self.world_size > self.gpus_per_node

    def has_cp(self) -> bool:
        """Whether context parallelism is on: cp_size above 1.

        Returns
        -------
        bool
        """
        return self.cp_size > 1

    def has_tp(self) -> bool:
        """Whether tensor parallelism is on: tp_size above 1.

        Returns
        -------
        bool
        """
        return self.tp_size > 1

    def has_pp(self) -> bool:
        """Whether there are several pipeline stages.

        Returns
        -------
        bool
        """
        return self.pp_size > 1

    def has_moe_cluster(self) -> bool:
        """Whether experts are split into clusters: moe_cluster_size above 1.

        Returns
        -------
        bool
        """
        return self.moe_cluster_size > 1

    def has_moe_tp(self) -> bool:
        """Whether an expert is split over ranks: moe_tp_size above 1.

        Returns
        -------
        bool
        """
        return self.moe_tp_size > 1

    def has_moe_ep(self) -> bool:
        """Whether ranks have different experts: moe_ep_size above 1.

        Returns
        -------
        bool
        """
        return self.moe_ep_size > 1

    def is_first_pp_rank(self) -> bool:
        """Whether this rank is in the first pipeline stage.

        Returns
        -------
        bool
        """
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        """Whether this rank is in the last pipeline stage.

        Returns
        -------
        bool
        """
        return self.pp_rank == self.pp_size - 1

    def is_second_last_pp_rank(self) -> bool:
        """Whether this rank is in the last pipeline stage but one.

        Returns
        -------
        bool
        """
        return self.pp_rank == self.pp_size - 2

    def prev_pp_rank(self) -> int:
        """The rank in this one's place one stage before; of the first stage, in the last.

        Returns
        -------
        int
        """
        return (self.rank - self.tp_size * self.cp_size) % self.world_size

    def next_pp_rank(self) -> int:
        """The rank in this one's place one stage later; of the last stage, in the first.

        Returns
        -------
        int
        """
        return (self.rank + self.tp_size * self.cp_size) % self.world_size

    @checked
    def pp_layers(self, num_layers: int) -> list[int]:
        """The layers of this rank's stage; the first stages have one more where they do not divide.

        Parameters
        ----------
        num_layers : int
            Of the model.

        Returns
        -------
        list of int
            From 0 on.
        """
        each, more = divmod(num_layers, self.pp_size)
        first = self.pp_rank * each + min(self.pp_rank, more)
        return list(range(first, first + each + (self.pp_rank < more)))

    @checked
    def ep_experts(self, num_experts: int) -> list[int]:
        """The experts of this rank.

        Parameters
        ----------
        num_experts : int
            Of a layer; a multiple of moe_ep_size.

        Returns
        -------
        list of int
            From 0 on.

        Raises
        ------
        ValueError
            moe_ep_size does not divide them.
        """
        require(num_experts % self.moe_ep_size == 0, "num_experts", num_experts, f"a multiple of {self.moe_ep_size}")
        each = num_experts // self.moe_ep_size
        return list(range(self.moe_ep_rank * each, (self.moe_ep_rank + 1) * each))

    @classmethod
    def from_dict(cls, mapping: dict) -> Mapping:
        """A mapping from the constructor's arguments.

        Parameters
        ----------
        mapping : dict
            By name, as `to_dict` gives them.

        Returns
        -------
        Mapping

        Raises
        ------
        ValueError
            As the constructor.
        TypeError
            A name that the constructor does not have.
        """
        return cls(**mapping)

    def to_dict(self) -> dict:
        """The constructor's arguments, defaults worked out.

        Returns
        -------
        dict
        """
        names = (
            "world_size", "rank", "gpus_per_node", "cp_size", "cp_config", "tp_size", "pp_size", "moe_cluster_size",
            "moe_tp_size", "moe_ep_size", "attn_tp_size", "attn_cp_size", "auto_parallel", "enable_attention_dp",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}
