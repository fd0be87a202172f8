"""The steps that pipelines are made of: each takes one type of tensor and gives one."""

from __future__ import annotations

from numbers import Real
from typing import ClassVar

import torch

from flashinfer import sampling
from flashinfer._core.checks import WrongKind, require, same_device
from flashinfer.logits_processor.op import ParameterizedOp
from flashinfer.logits_processor.types import TaggedTensor, TensorType

LOGITS, PROBS, INDICES = TensorType.LOGITS, TensorType.PROBS, TensorType.INDICES


def per_row(name: str, value: torch.Tensor, batch: int, device: torch.device) -> torch.Tensor | float:
    """A tensor as [batch]; one element holds for all rows, and where it is on another device it is a number."""
    if value.numel() == 1 and not value.is_meta:
        return value.reshape(1).expand(batch) if value.device == device else value.item()
    require(value.shape in ((batch,), (batch, 1)), name, tuple(value.shape), f"[{batch}], or one element")
    return value.reshape(batch)


def _of_rows(name: str, value, x: torch.Tensor) -> torch.Tensor | float:
    """A parameter as a number, or as [rows of x, 1]."""
    if isinstance(value, torch.Tensor):
        value = per_row(name, value, len(x), x.device)
    if isinstance(value, torch.Tensor):
        same_device(x=x, **{name: value})
        return value[:, None]
    return _number(name, value)


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise WrongKind(f"{name}: got {value!r}; allowed: a number, or a tensor")
    number = float(value)
    require(name != "temperature" or number > 0, name, value, "above 0")
    return number


class TemperatureOp(ParameterizedOp):
    IN, OUT = LOGITS, LOGITS
    NEEDS = ("temperature",)

    def __call__(self, tensor, **kwargs):
        logits = tensor.data
        temperature = _of_rows("temperature", self.runtime(kwargs)["temperature"], logits)
        if isinstance(temperature, torch.Tensor):
            # 0 stands for equal logits in `flashinfer.softmax`, as infinity does.
            temperature = temperature.where(temperature != 0, torch.inf).where(temperature >= 0, torch.nan)
        scaled = logits / temperature
        # -inf stays -inf at a temperature of infinity.
        return TaggedTensor.logits(scaled.where((logits != -torch.inf) | (temperature != temperature), -torch.inf))


class SoftmaxOp(ParameterizedOp):
    IN, OUT = LOGITS, PROBS
    TAKES = ("enable_pdl",)

    def __call__(self, tensor, **kwargs):
        return TaggedTensor.probs(sampling.softmax(tensor.data, **self.runtime(kwargs)))


class FusedTemperatureSoftmaxOp(SoftmaxOp):
    NEEDS = ("temperature",)

    def __call__(self, tensor, **kwargs):
        given = self.runtime(kwargs)
        temperature = given["temperature"]
        if isinstance(temperature, torch.Tensor):
            # One for all rows, or one for each, as the steps that this stands for have it.
            temperature = per_row("temperature", temperature, len(tensor.data), tensor.data.device)
        each = isinstance(temperature, torch.Tensor)
        given["temperature"] = temperature.float() if each else _number("temperature", temperature)
        return TaggedTensor.probs(sampling.softmax(tensor.data, **given))


class LogitsTopKOp(ParameterizedOp):
    IN, OUT = LOGITS, LOGITS
    NEEDS = ("top_k",)

    def __call__(self, tensor, **kwargs):
        return TaggedTensor.logits(sampling.top_k_mask_logits(tensor.data, **self.runtime(kwargs)))


class ProbsTopKOp(ParameterizedOp):
    IN, OUT = PROBS, PROBS
    NEEDS = ("top_k",)

    def __call__(self, tensor, **kwargs):
        joint = self.params.get("joint_topk_topp", False)
        require(not joint, "joint_topk_topp", joint, "False in steps that run one by one")
        return TaggedTensor.probs(sampling.top_k_renorm_probs(tensor.data, **self.runtime(kwargs)))


def _portions(given: dict) -> dict:
    """Runtime parameters of which a number for `top_p` or `min_p` is above 0 and at most 1."""
    for name in ("top_p", "min_p"):
        value = given.get(name, 1)
        if not isinstance(value, torch.Tensor):
            require(0 < float(value) <= 1, name, value, "above 0 and at most 1, or a tensor")
    return given


class TopPOp(ParameterizedOp):
    IN, OUT = PROBS, PROBS
    NEEDS = ("top_p",)

    def __call__(self, tensor, **kwargs):
        return TaggedTensor.probs(sampling.top_p_renorm_probs(tensor.data, **_portions(self.runtime(kwargs))))


class MinPOp(ParameterizedOp):
    """In torch: alone, without a draw, it is not a serving step. Before a Sample it is fused with it."""

    IN, OUT = PROBS, PROBS
    NEEDS = ("min_p",)

    def __call__(self, tensor, **kwargs):
        probs = tensor.data.float()
        share = _of_rows("min_p", _portions(self.runtime(kwargs))["min_p"], probs)
        share = share if isinstance(share, torch.Tensor) else probs.new_full((1, 1), share)
        kept = (probs >= share * probs.amax(-1, keepdim=True)) & (share >= 0) & (share <= 1)
        kept = probs.clamp(min=0).where(kept, 0)
        total = kept.sum(-1, keepdim=True)
        shares = kept / total.where(total > 0, 1)
        broken = (probs.isnan() | probs.isposinf()).any(-1, keepdim=True)
        return TaggedTensor.probs(shares.where(~broken, torch.nan))


class SampleOp(ParameterizedOp):
    """A draw. `FUNCTION` names it in flashinfer.sampling."""

    OUT = INDICES
    FUNCTION: ClassVar[str]
    TAKES = ("indices", "deterministic", "generator", "check_nan", "seed", "offset")

    def __call__(self, tensor, **kwargs):
        given = _portions(self.runtime(kwargs))
        return TaggedTensor.indices(getattr(sampling, self.FUNCTION)(tensor.data, **given))


class LogitsSampleOp(SampleOp):
    IN = LOGITS
    FUNCTION = "sampling_from_logits"


class ProbsSampleOp(SampleOp):
    IN = PROBS
    FUNCTION = "sampling_from_probs"


class FusedProbsTopKSampleOp(ProbsSampleOp):
    FUNCTION = "top_k_sampling_from_probs"
    NEEDS = ("top_k",)


class FusedProbsTopPSampleOp(ProbsSampleOp):
    FUNCTION = "top_p_sampling_from_probs"
    NEEDS = ("top_p",)


class FusedProbsMinPSampleOp(ProbsSampleOp):
    FUNCTION = "min_p_sampling_from_probs"
    NEEDS = ("min_p",)


class FusedProbsTopKTopPSampleOp(ProbsSampleOp):
    """Both filters and the draw; `filter_apply_order` is among its params."""

    FUNCTION = "top_k_top_p_sampling_from_probs"
    NEEDS = ("top_k", "top_p")
    TAKES = (*ProbsSampleOp.TAKES, "filter_apply_order")
