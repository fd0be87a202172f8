"""What a step of a pipeline is: it takes one type of tensor and gives one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from flashinfer._core.checks import require
from flashinfer.logits_processor.types import TaggedTensor, TensorType


class Op(ABC):
    """A step. A subclass sets `IN` and `OUT` and defines `__call__`.

    Parameters
    ----------
    **params
        What is fixed beforehand, kept as `params`.

    Raises
    ------
    ValueError
        The subclass has no IN or no OUT.
    """

    IN: ClassVar[TensorType]
    OUT: ClassVar[TensorType]

    def __init__(self, **params: Any):
        for name in ("IN", "OUT"):
            kind = getattr(self, name, None)
            require(isinstance(kind, TensorType), name, kind, f"a TensorType in {type(self).__name__}")
        self.params = params

    @abstractmethod
    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        """The result, of type `OUT`; `kwargs` are the pipeline's runtime parameters."""

    def _validate_input_type(self, tensor: TaggedTensor) -> TensorType:
        require(tensor.type is self.IN, "tensor", tensor.type.name, f"{self.IN.name}, which {self!r} takes")
        return self.OUT

    def __repr__(self) -> str:
        return type(self).__name__


class ParameterizedOp(Op):
    """A step that needs parameters when it runs, listed in `NEEDS`; those in `TAKES` may be left out.

    A step that lists none reads what it likes by `_get_param`: what is given to the pipeline is then not checked.

    Parameters
    ----------
    **params
        Those that are fixed beforehand; a runtime parameter of the same name takes precedence.
    """

    NEEDS: ClassVar[tuple[str, ...]] = ()
    TAKES: ClassVar[tuple[str, ...]] = ()

    @property
    def default_params(self) -> dict[str, Any]:
        """The parameters fixed beforehand."""
        return self.params

    @classmethod
    def _lists_parameters(cls) -> bool:
        """Whether no other names than those listed may be given."""
        return bool(cls.NEEDS or cls.TAKES)

    def runtime(self, kwargs: dict) -> dict:
        """The parameters of this step, the fixed ones under those given at run time.

        Parameters
        ----------
        kwargs : dict
            Runtime parameters of the whole pipeline, by name; None leaves a fixed one.

        Returns
        -------
        dict
            Those in `NEEDS` and `TAKES` that have a value.

        Raises
        ------
        ValueError
            One in `NEEDS` has none.
        """
        given = self.params | {name: value for name, value in kwargs.items() if value is not None}
        for name in self.NEEDS:
            require(given.get(name) is not None, name, None, f"a value, which {self!r} needs")
        return {name: given[name] for name in (*self.NEEDS, *self.TAKES) if name in given}

    def _get_param(self, name: str, kwargs: dict[str, Any], required: bool = True) -> Any:
        """One parameter, taken out of `kwargs`, or else as it was fixed; None where it is not required."""
        value = kwargs.pop(name) if name in kwargs else self.params.get(name)
        require(value is not None or not required, name, None, f"a value, which {self!r} needs")
        return value
