"""A layer of experts over ranks in one call: tokens to the ranks of their experts, both products, and back."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from flashinfer._core.checks import require, require_fit, require_tensor, same_device
from flashinfer.moe_ep import mega_workspace
from flashinfer.moe_ep.config import BootstrapConfig, MoEEpCommParams
from flashinfer.moe_ep.mega_config import FleetParams, MegaConfig, Scaled, require_count
from flashinfer.moe_ep.mega_experts import prepared
from flashinfer.moe_ep.mega_workspace import MoEEpMegaWorkspace
from flashinfer.moe_ep.tensors import MoEEpTensors, MoEWeightPack

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ONLY_NONE = ("fc1_alpha", "fc2_alpha", "fc1_norm_const", "recv_count", "num_tokens_per_expert")


class _Inputs(NamedTuple):
    """What travels, and the most tokens of any rank."""

    rows: torch.Tensor
    scale: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    most: int


class MoEEpMegaLayer(torch.nn.Module):
    """A layer of experts that are spread over ranks, in one call: ``y = sum_e s_e * (w2_e @ (silu(gate_e) * up_e))``.

    A call sends each token to the ranks of its experts, runs their two products, and adds what comes back. Calls are
    collective: the same on every rank, in one order. It is dispatch and combine of `NVLinkOneSidedAlltoAll` and the
    kernels of `flashinfer.fused_moe` between them, one after another, rather than one kernel, on every device.

    Parameters
    ----------
    bootstrap : BootstrapConfig
        The ranks; one rank needs no process group.
    fleet_params : FleetParams
        Sizes, the same on every rank.
    weights : MoEWeightPack, optional
        This rank's experts. The layer keeps none of them but w2 where it needs no copy. Not read with
        transformed_weights, and may be None then.
    backend : MegaConfig
        What experts compute. bfloat16, float16 and float32 weights of FP8 experts are quantised here, each scale the
        largest magnitude over 448.

    Raises
    ------
    ValueError
        A weight, a scale or a size other than the above, or experts that the ranks do not divide.

    Notes
    -----
    A rank's share of a token is rounded to bfloat16; shares are added in float32 in the order of ranks. Results repeat
    bit for bit. Rows are computed for the most tokens that a rank may have, whoever has fewer: a workspace of its own
    for short calls, or `stage_inputs` with a number for all ranks, spares this work. For a CUDA graph call `warmup` on
    every rank first.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.moe_ep import BootstrapConfig, Bf16MegaMoeConfig, FleetParams, MegaConfig
    >>> from flashinfer.moe_ep import MoEEpMegaLayer, MoEEpTensors, MoEWeightPack
    >>> pack = MoEWeightPack(torch.ones(4, 64, 32).bfloat16() / 32, torch.ones(4, 32, 32).bfloat16() / 32)
    >>> backend = MegaConfig(Bf16MegaMoeConfig(intermediate_size=32, top_k=2))
    >>> layer = MoEEpMegaLayer(BootstrapConfig(1, 0), FleetParams(4, 8, 32), pack, backend)
    >>> x, ids = torch.ones(2, 32).bfloat16(), torch.tensor([[0, 3], [1, -1]])
    >>> layer(MoEEpTensors(x, ids, torch.full((2, 2), 0.5)))[:, 0]
    tensor([0.7305, 0.3652], dtype=torch.bfloat16)
    >>> layer.destroy()
    """

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        fleet_params: FleetParams,
        weights: MoEWeightPack | None,
        backend: MegaConfig,
    ):
        super().__init__()
        for name, value, kind in (
            ("bootstrap", bootstrap, BootstrapConfig),
            ("fleet_params", fleet_params, FleetParams),
            ("backend", backend, MegaConfig),
        ):
            require(isinstance(value, kind), name, type(value).__name__, f"a {kind.__name__}")
        ranks, count = bootstrap.world_size, fleet_params.num_experts
        require(count % ranks == 0, "num_experts", count, f"a multiple of {ranks}, the ranks")
        self._top_k = backend.megakernel.top_k
        require(self._top_k <= count, "top_k", self._top_k, f"at most {count}, the experts")
        self._experts = prepared(
            backend.megakernel, fleet_params, bootstrap.rank, ranks, weights, backend.transformed_weights
        )
        device = self._experts.device
        if device.type == "cuda":
            fits = bootstrap.device in (None, device.index)
            require(fits, "device", bootstrap.device, f"{device.index}, where the weights are")
            bootstrap = replace(bootstrap, device=device.index)
        self._bootstrap, self._fleet_params, self._backend = bootstrap, fleet_params, backend
        self._workspace: MoEEpMegaWorkspace | None = None
        self._workspaces: list[MoEEpMegaWorkspace] = []
        self._staged: tuple[MoEEpMegaWorkspace, _Inputs] | None = None
        self._destroyed = False

    @property
    def transformed_weights(self) -> tuple[Scaled, Scaled]:
        """((w13, w13_scale), (w2, w2_scale)) as `MegaConfig` takes them: the up-projection's rows first."""
        return self._experts.transformed

    @property
    def supports_output_view(self) -> bool:
        """True: `forward` has return_workspace_view."""
        return True

    @property
    def output_buffer(self) -> torch.Tensor:
        """bfloat16 [max_tokens_per_rank, hidden]: where views lie that calls without a workspace of their own return.

        It is made by the first use, as the memory of such calls is: a collective call."""
        return self._output_of(self._own_workspace())

    def create_workspace(self, max_tokens_per_rank: int) -> MoEEpMegaWorkspace:
        """Make memory for calls of up to so many tokens a rank. A collective call.

        Parameters
        ----------
        max_tokens_per_rank : int
            The most tokens of a rank in a call with it; fewer than in the layer's sizes make short calls quicker.

        Returns
        -------
        MoEEpMegaWorkspace

        Raises
        ------
        ValueError
            Not an int of at least 1.
        RuntimeError
            The stream is captured, or the layer is destroyed.
        TimeoutError
            A rank did not come within the deadline of set-ups.
        """
        self._check_alive()
        require_count("max_tokens_per_rank", max_tokens_per_rank)
        params = MoEEpCommParams(
            self._fleet_params.num_experts, self._top_k, max_tokens_per_rank, self._fleet_params.token_hidden_size,
            torch.bfloat16, self._experts.dispatch_format,
        )  # fmt: skip
        made = mega_workspace.made(self._bootstrap, params, self._experts.device)
        self._workspaces.append(made)
        return made

    def warmup(self, t: MoEEpTensors | None = None, *, workspace: MoEEpMegaWorkspace | None = None) -> None:
        """Make memory and compile kernels, by a call. A collective call.

        Parameters
        ----------
        t : MoEEpTensors, optional
            The call's; by default as many rows of zeros as fit.
        workspace : MoEEpMegaWorkspace, optional
            As in `forward`.

        Raises
        ------
        ValueError, RuntimeError, TimeoutError
            As `forward` raises them.
        """
        space = self._space(workspace)
        self._output_of(space)
        self.forward(self._dummy(space.max_tokens_per_rank) if t is None else t, workspace=space)
        if self._experts.device.type == "cuda":
            torch.cuda.synchronize(self._experts.device)

    def _dummy(self, tokens: int) -> MoEEpTensors:
        made = self._experts
        hidden, device = self._fleet_params.token_hidden_size, made.device
        dtype = torch.bfloat16 if self._backend.quantize_input else made.row_dtype
        x = torch.zeros(tokens, hidden, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
        scales = None
        if not self._backend.quantize_input and made.encoding == "fp8_block":
            scales = torch.ones(tokens, hidden // 128, dtype=torch.float32, device=device)
        ids = torch.arange(tokens * self._top_k, device=device) % self._fleet_params.num_experts
        weights = torch.full((tokens, self._top_k), 1 / self._top_k, dtype=torch.float32, device=device)
        return MoEEpTensors(x, ids.view(tokens, -1).int(), weights, scales)

    def stage_inputs(
        self,
        t: MoEEpTensors,
        *,
        workspace: MoEEpMegaWorkspace | None = None,
        compile_tokens_per_rank: int | None = None,
    ) -> None:
        """Copy the inputs of a call, quantised, to where `compute_staged` reads them, as often as it is called.

        Parameters
        ----------
        t : MoEEpTensors
            As in `forward`; its output is not used.
        workspace : MoEEpMegaWorkspace, optional
            As in `forward`.
        compile_tokens_per_rank : int, optional
            The most tokens of any rank in this call, the same on every rank: rows are computed for so many. By default
            those of the workspace.

        Raises
        ------
        ValueError, RuntimeError, TimeoutError
            As `forward` raises them; a number below this rank's tokens, or above the workspace's.
        """
        space = self._space(workspace)
        self._check(t, space)
        most, limit, tokens = compile_tokens_per_rank, space.max_tokens_per_rank, t.num_tokens
        if most is None:
            most = limit
        require_count("compile_tokens_per_rank", most)
        require(tokens <= most <= limit, "compile_tokens_per_rank", most, f"{tokens} to {limit}")
        given, kept = self._inputs(t, most), {}
        for name in ("rows", "scale", "ids", "weights"):
            x = getattr(given, name)
            kept[name] = None if x is None else space.buffers.get(name, x.shape[1], x.dtype)[:tokens].copy_(x)
        space.buffers.owner = weakref.ref(self)
        self._staged = space, given._replace(**kept)

    def compute_staged(self, *, output: torch.Tensor | None) -> torch.Tensor:
        """Run the layer on what `stage_inputs` has staged last. A collective call.

        Parameters
        ----------
        output : torch.Tensor or None
            As in `MoEEpTensors`. None returns a view, as return_workspace_view of `forward` does.

        Returns
        -------
        torch.Tensor
            bfloat16 [tokens, hidden].

        Raises
        ------
        ValueError
            An output other than the above.
        RuntimeError
            This layer has staged nothing, another one with the same memory has staged since, or it is destroyed.
        TimeoutError
            A rank did not come within the deadline.
        """
        self._check_alive()
        if self._staged is None or not self._is_last(self._staged[0]):
            raise RuntimeError("MoEEpMegaLayer: compute_staged comes after this layer's stage_inputs")
        space, inputs = self._staged
        output = self._output_of(space) if output is None else output
        return self._run(space, inputs, self._output(output, len(inputs.rows)))

    def _is_last(self, space: MoEEpMegaWorkspace) -> bool:
        owner = space.buffers.owner
        return not space.is_destroyed and owner is not None and owner() is self

    def forward(
        self,
        t: MoEEpTensors,
        *,
        workspace: MoEEpMegaWorkspace | None = None,
        return_workspace_view: bool = False,
    ) -> torch.Tensor:
        """Run the layer on this rank's tokens. A collective call.

        Parameters
        ----------
        t : MoEEpTensors
            This rank's tokens; zero to the workspace's most.
        workspace : MoEEpMegaWorkspace, optional
            One that this layer has made; by default its own, of max_tokens_per_rank, made by the first call.
        return_workspace_view : bool
            Whether the result lies in memory of the workspace, which the next call writes, by any layer of the same
            ranks and sizes. Not with t.output.

        Returns
        -------
        torch.Tensor
            bfloat16 [tokens, hidden]: t.output's first rows, a view, or a new tensor.

        Raises
        ------
        ValueError
            A tensor other than the above.
        RuntimeError
            The layer is destroyed, or memory would have to be made in a captured stream.
        TimeoutError
            A rank did not come within the deadline.
        """
        space = self._space(workspace)
        self._check(t, space)
        view = return_workspace_view
        require(t.output is None or not view, "return_workspace_view", view, "False, with an output")
        output = self._output_of(space) if view else t.output
        if output is not None:
            output = self._output(output, t.num_tokens)
        return self._run(space, self._inputs(t, space.max_tokens_per_rank), output)

    def destroy(self) -> None:
        """Free the memory; once is enough. On every rank, after the calls and graphs that use it."""
        self._destroyed, self._staged, self._workspace = True, None, None
        # All of them, whatever one of them raises.
        with ExitStack() as each:
            while self._workspaces:
                each.callback(self._workspaces.pop().destroy)

    def _run(self, space: MoEEpMegaWorkspace, inputs: _Inputs, output: torch.Tensor | None) -> torch.Tensor:
        rows, scale, ids, weights, most = inputs
        got = space.ep.dispatch(rows, ids, weights, hidden_states_scale=scale, max_tokens_per_rank=most)
        # The experts write where the combine reads.
        share = space.ep.get_combine_input_buffer(torch.bfloat16)
        self._experts.run(got, share)
        return space.ep.combine(share, output=output)

    def _check_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError("MoEEpMegaLayer: it is destroyed")

    def _own_workspace(self) -> MoEEpMegaWorkspace:
        self._check_alive()
        if self._workspace is None or self._workspace.is_destroyed:
            self._workspace = self.create_workspace(self._fleet_params.max_tokens_per_rank)
        return self._workspace

    def _space(self, workspace: MoEEpMegaWorkspace | None) -> MoEEpMegaWorkspace:
        self._check_alive()
        if workspace is None:
            return self._own_workspace()
        mine = any(workspace is x for x in self._workspaces) and not workspace.is_destroyed
        require(mine, "workspace", workspace, "one of this layer's create_workspace, not destroyed")
        return workspace

    def _output_of(self, space: MoEEpMegaWorkspace) -> torch.Tensor:
        return space.buffers.get("output", self._fleet_params.token_hidden_size, torch.bfloat16)

    def _output(self, output: torch.Tensor, tokens: int) -> torch.Tensor:
        """The rows of a tensor that the result goes to."""
        require_tensor("output", output)
        hidden = self._fleet_params.token_hidden_size
        fits = output.dim() == 2 and len(output) >= tokens and output.shape[1] == hidden and output.is_contiguous()
        require_fit("output", output, fits, f"[{tokens} or more, {hidden}], contiguous", torch.bfloat16)
        same_device(w13=self._experts.weights.w13, output=output)
        return output if len(output) == tokens else output[:tokens]

    def _check(self, t: MoEEpTensors, space: MoEEpMegaWorkspace) -> None:
        """Every field, before anything is sent."""
        for name in ("hidden_states", "topk_ids", "topk_weights"):
            require_tensor(name, getattr(t, name))
        for name in _ONLY_NONE:
            require(getattr(t, name) is None, name, "a tensor", "None")
        made, hidden = self._experts, self._fleet_params.token_hidden_size
        x, limit = t.hidden_states, space.max_tokens_per_rank
        fits = x.dim() == 2 and len(x) <= limit and x.shape[1] == hidden
        require(fits, "hidden_states", tuple(x.shape), f"[0 to {limit}, {hidden}]")
        coded = made.encoding != "bf16" and not self._backend.quantize_input
        dtype = made.row_dtype if coded else torch.bfloat16
        require(x.dtype == dtype, "hidden_states", x.dtype, str(dtype))
        shape = (len(x), self._top_k)
        for name, tensor in (("topk_ids", t.topk_ids), ("topk_weights", t.topk_weights)):
            require(tuple(tensor.shape) == shape, name, tuple(tensor.shape), f"{shape}")
        require(t.topk_ids.dtype in (torch.int32, torch.int64), "topk_ids", t.topk_ids.dtype, "int32, int64")
        allowed = ", ".join(map(str, _WEIGHT_DTYPES))
        require(t.topk_weights.dtype in _WEIGHT_DTYPES, "topk_weights", t.topk_weights.dtype, allowed)
        if coded and made.encoding == "fp8_block":
            require_tensor("scales", t.scales)
            shape, scales = (len(x), hidden // 128), cast(torch.Tensor, t.scales)
            fits = scales.dtype == torch.float32 and tuple(scales.shape) == shape
            require(fits, "scales", f"{scales.dtype} {tuple(scales.shape)}", f"float32 {shape}")
        else:
            require(t.scales is None, "scales", "a tensor", f"None with {dtype} rows of {made.encoding} experts")
        same_device(
            w13=made.weights.w13, hidden_states=x, topk_ids=t.topk_ids, topk_weights=t.topk_weights, scales=t.scales
        )

    def _inputs(self, t: MoEEpTensors, most: int) -> _Inputs:
        """What travels of a call."""
        x, scale = t.hidden_states, t.scales
        if x.dtype == torch.bfloat16:
            x, scale = self._experts.rows(x)
        return _Inputs(x, scale, t.topk_ids, t.topk_weights, most)
