"""The steps that pipelines are made of: each takes one type of tensor and gives one."""

from __future__ import annotations

from typing import ClassVar

import torch

from flashinfer import sampling
from flashinfer._core.checks import require
from flashinfer.logits_processor.op import ParameterizedOp
from flashinfer.logits_processor.types import TaggedTensor, TensorType

LOGITS, PROBS, INDICES = TensorType.LOGITS, TensorType.PROBS, TensorType.INDICES


class TemperatureOp(ParameterizedOp):
    IN, OUT = LOGITS, LOGITS
    NEEDS = ("temperature",)

    def __call__(self, tensor, **kwargs):
        temperature = self.runtime(kwargs)["temperature"]
        if isinstance(temperature, torch.Tensor) and temperature.dim():
            temperature = temperature[:, None]
        else:
            require(float(temperature) > 0, "temperature", float(temperature), "above 0")
        # -inf stays -inf at a temperature of infinity.
        return TaggedTensor.logits((tensor.data / temperature).where(tensor.data != -torch.inf, -torch.inf))


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
        if isinstance(temperature, torch.Tensor) and temperature.numel() == 1:
            # One for all rows, as the steps that this stands for have it.
            given["temperature"] = temperature.float().reshape(1).expand(len(tensor.data))
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
        min_p = _portions(self.runtime(kwargs))["min_p"]
        probs = tensor.data.float()
        share = min_p[:, None] if isinstance(min_p, torch.Tensor) and min_p.dim() else min_p
        kept = probs.where(probs >= share * probs.amax(-1, keepdim=True), 0)
        return TaggedTensor.probs(kept / kept.sum(-1, keepdim=True))


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
