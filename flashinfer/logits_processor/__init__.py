"""Pipelines from logits to tokens, put together from processors and fused into few launches."""

from flashinfer.logits_processor.compiler import CompileError, FusionRule
from flashinfer.logits_processor.operators import Op, ParameterizedOp
from flashinfer.logits_processor.pipeline import LogitsPipe
from flashinfer.logits_processor.processors import (
    LegalizationError,
    LogitsProcessor,
    MinP,
    Sample,
    Softmax,
    Temperature,
    TopK,
    TopP,
)
from flashinfer.logits_processor.types import TaggedTensor, TensorType

__all__ = [
    "CompileError",
    "FusionRule",
    "LegalizationError",
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Op",
    "ParameterizedOp",
    "Sample",
    "Softmax",
    "TaggedTensor",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
]
