"""`hash_topk`: the experts of a token by its id."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, require, require_fit, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.ops.moe import hash_routing as room

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_INDEX = (torch.int32, torch.int64)


@checked
def hash_topk(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    launch_with_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts that a table names for each token id, weighed by router logits.

    A weight is ``s / s.sum()`` over the token's experts, with ``s = sqrt(log(1 + exp(logit)))``.

    Parameters
    ----------
    router_logits : torch.Tensor
        [tokens, experts]; float32, bfloat16 or float16, any strides.
    input_ids : torch.Tensor
        [tokens] int64 or int32: ids in the vocabulary.
    tid2eid : torch.Tensor
        [vocabulary, top_k] int32 or int64: the experts of each id; up to 32. One that is negative, or past the last,
        has id -1 and weight 0 in the result, as have all of an id outside the table.
    num_fused_shared_experts : int
        0 or 1: whether expert number `experts` follows, with weight ``1 / routed_scaling_factor``.
    routed_scaling_factor : float
        Not 0. What the caller will multiply all weights with; the routed ones are not multiplied here.
    launch_with_pdl : bool
        Programmatic dependent launch. It has no effect on results.

    Returns
    -------
    topk_weights : torch.Tensor
        float32 [tokens, top_k + num_fused_shared_experts].
    topk_ids : torch.Tensor
        int32, the same shape.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.fused_moe import hash_topk
    >>> table = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)  # two ids, two experts each
    >>> weights, experts = hash_topk(torch.zeros(3, 4), torch.tensor([1, 0, 1]), table)
    >>> experts.tolist(), weights[0].tolist()
    ([[1, 3], [0, 2], [1, 3]], [0.5, 0.5])
    """
    require_fit("router_logits", router_logits, router_logits.dim() == 2, "[tokens, experts]", *_LOGITS)
    tokens, experts = router_logits.shape
    require(tuple(input_ids.shape) == (tokens,), "input_ids", tuple(input_ids.shape), f"[{tokens}]")
    fits = tid2eid.dim() == 2 and 1 <= tid2eid.shape[1] <= 32 and len(tid2eid) > 0 and experts > 0
    require(fits, "tid2eid", tuple(tid2eid.shape), "[vocabulary, 1 to 32]")
    for name, table in (("input_ids", input_ids), ("tid2eid", tid2eid)):
        require(table.dtype in _INDEX, name, table.dtype, "int32, int64")
    require(num_fused_shared_experts in (0, 1), "num_fused_shared_experts", num_fused_shared_experts, "0, 1")
    require(routed_scaling_factor != 0, "routed_scaling_factor", routed_scaling_factor, "a number other than 0")
    device = same_device(router_logits=router_logits, input_ids=input_ids, tid2eid=tid2eid)
    shape = tokens, tid2eid.shape[1] + num_fused_shared_experts
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    _hash_route(router_logits, input_ids.contiguous(), tid2eid.contiguous(), 1 / routed_scaling_factor, ids, weights)
    return weights, ids


@custom_op("flashinfer::moe_hash_route", mutates_args=("ids", "weights"))
def _hash_route(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    shared_weight: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    if not ids.numel():
        return
    problem = room.Problem(
        dtype=dtype_name(logits.dtype),
        token=dtype_name(tokens.dtype),
        expert=dtype_name(table.dtype),
        slots=1 << (ids.shape[1] - 1).bit_length(),
    )
    room.hash_route(problem, logits.device).run(logits, tokens, table, shared_weight, ids, weights)
