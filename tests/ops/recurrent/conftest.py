"""What the interpreter leaves out of a product, and of an extremum."""

import numpy as np
import pytest


@pytest.fixture
def cut_operands(monkeypatch, device):
    """Products in tf32 as tensor cores make them: without the last 13 bits of an operand, which are cut off."""
    if device.type != "cpu":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def cut(x):
        whole = np.ascontiguousarray(x.data)
        return TensorHandle((whole.view(np.int32) & -0x2000).view(np.float32), x.dtype.scalar)

    def create_dot(self, a, b, d, input_precision, most):
        if a.data.dtype == np.float32 and input_precision.name == "TF32":
            a, b = cut(a), cut(b)
        return dot(self, a, b, d, input_precision, most)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def extrema_of_a_gpu(monkeypatch, device):
    """Of a number and NaN a GPU's minimum and maximum are the number, unless NaN is asked for; numpy's are NaN."""
    if device.type == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
            monkeypatch.setattr(InterpreterBuilder, name, lambda self, a, b, of=function: self.binary_op(a, b, of))
