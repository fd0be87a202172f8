"""Descriptions of calls, as flashinfer-bench reads them: which axes their tensors have, and which of those vary."""

from flashinfer.trace.template import Const, Scalar, Tensor, TraceTemplate, Var

__all__ = ["Const", "Scalar", "Tensor", "TraceTemplate", "Var"]
