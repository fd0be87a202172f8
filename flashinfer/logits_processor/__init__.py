"""Pipelines from logits to tokens, put together from processors and fused into few launches."""

from flashinfer.logits_processor.compiler import CompileError, Compiler, compile_pipeline
from flashinfer.logits_processor.fusion_rules import FusionRule
from flashinfer.logits_processor.legalization import LegalizationError, legalize_processors
from flashinfer.logits_processor.op import Op, ParameterizedOp
from flashinfer.logits_processor.pipeline import LogitsPipe
from flashinfer.logits_processor.processors import (
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
    "Compiler",
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
    "compile_pipeline",
    "legalize_processors",
]
