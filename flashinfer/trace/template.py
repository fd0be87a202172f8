"""A template says how a function's arguments have axes in common; with a call's arguments it gives its definition."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from flashinfer._core.checks import require

# What sources in definitions may use by name.
_IMPORTS = "from __future__ import annotations\nimport math\nimport torch\nimport torch.nn.functional as F\n\n\n"


@dataclass(frozen=True)
class Var:
    """An axis whose length is another in each call, such as a batch."""

    description: str = ""


@dataclass(frozen=True)
class Const:
    """An axis whose length is the model's, such as a hidden size. Its length is part of a definition's name.

    Attributes
    ----------
    description : str
    abbrev : str, optional
        What stands before the length in a name: the axis by default; with "" the axis is not in it.
    value : int, optional
        The length, where no argument tells it.
    """

    description: str = ""
    abbrev: str | None = None
    value: int | None = None

    def __post_init__(self):
        if self.value is not None and type(self.value) is not int:
            raise TypeError(f"value: got {self.value!r}; allowed: an integer, or None")


@dataclass(frozen=True)
class Tensor:
    """A tensor among arguments or results.

    Attributes
    ----------
    dim_names : list of str
        Its axes.
    param : str, optional
        The parameter, where it has another name than the tensor has in the template.
    tuple_idx : int, optional
        Its place in a tuple.
    dtype : str, optional
        Of a result; of an argument that is not given. A result without one, and without `dtype_from`, has that of the
        first argument with an axis in common.
    dtype_from : str, optional
        The parameter whose dtype a result has.
    dtype_from_scalar : str, optional
        The parameter that says a result's dtype, where that of `dtype_from` is not given.
    optional : bool
        Whether it may be left out.
    description : str
    """

    dim_names: list[str]
    param: str | None = field(default=None, kw_only=True)
    tuple_idx: int | None = field(default=None, kw_only=True)
    dtype: str | None = field(default=None, kw_only=True)
    dtype_from: str | None = field(default=None, kw_only=True)
    dtype_from_scalar: str | None = field(default=None, kw_only=True)
    optional: bool = field(default=False, kw_only=True)
    description: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Scalar:
    """A number among arguments or results; attributes as those of `Tensor`."""

    dtype: str = "float32"
    param: str | None = field(default=None, kw_only=True)
    optional: bool = field(default=False, kw_only=True)
    description: str = field(default="", kw_only=True)


class TraceTemplate:
    """What the definitions of a function's calls have in common.

    Parameters
    ----------
    op_type : str
        The kind of operation.
    axes : dict
        {name: Var or Const}.
    inputs, outputs : dict
        {name: Tensor or Scalar}.
    name_prefix : str, optional
        What names begin with; `op_type` by default.
    reference : callable, optional
        The operation in torch. Its source is part of definitions, where Python has it; it may use `math`, `torch` and
        `F` for torch.nn.functional.
    check, init : callable, optional
        How results are compared and arguments are made, for those who run definitions; their sources are as well.
    constraints, tags : list of str, optional
    description : str

    Examples
    --------
    >>> import torch
    >>> from flashinfer.trace import Const, Tensor, TraceTemplate, Var
    >>> x = Tensor(["rows", "columns"])
    >>> template = TraceTemplate("double", {"rows": Var(), "columns": Const(abbrev="c")}, {"x": x}, {"y": x})
    >>> template.definition("mine.double", {"x": torch.ones(2, 8)})["name"]
    'double_c8'
    """

    def __init__(
        self,
        op_type: str,
        axes: dict[str, Var | Const],
        inputs: dict[str, Tensor | Scalar],
        outputs: dict[str, Tensor | Scalar],
        *,
        name_prefix: str | None = None,
        reference: Callable | None = None,
        check: Callable | None = None,
        init: Callable | None = None,
        constraints: list[str] | None = None,
        tags: list[str] | None = None,
        description: str = "",
    ):
        self.op_type, self.name_prefix, self.description = op_type, name_prefix, description
        self.axes, self.inputs, self.outputs = axes, inputs, outputs
        self.reference, self.check, self.init = reference, check, init
        self.constraints, self.tags = constraints or [], tags or []

    def axis_values(self, arguments: dict[str, Any]) -> dict[str, int]:
        """Lengths of the axes that the arguments tell: by tensors that are required, numbers, then optional tensors.

        Tensors with as many axes as their template are asked first.
        """
        found: dict[str, int] = {}
        parts = [(name, part) for name, part in self.inputs.items() if isinstance(part, Tensor)]
        given = [(part, self.argument(name, arguments)) for name, part in parts]
        tensors = [(part, tensor) for part, tensor in given if isinstance(tensor, torch.Tensor)]
        tensors.sort(key=lambda pair: len(pair[0].dim_names) != pair[1].dim())
        for optional in (False, True):
            for part, tensor in tensors:
                if part.optional == optional:
                    for axis, length in zip(part.dim_names, tensor.shape):
                        found.setdefault(axis, int(length))
            for axis in self.axes.keys() - found.keys():
                value = self.argument(axis, arguments)
                if isinstance(value, Integral) and not isinstance(value, bool):
                    found[axis] = int(value)
        consts = {name: axis.value for name, axis in self.axes.items() if isinstance(axis, Const)}
        fixed = {name: value for name, value in consts.items() if value is not None}
        return {name: length for name, length in (found | fixed).items() if name in self.axes}

    def definition_name(self, axis_values: dict[str, int]) -> str:
        """The name of a definition: the prefix, and the length of each `Const`."""
        parts = [self.op_type if self.name_prefix is None else self.name_prefix]
        for name, axis in self.axes.items():
            if isinstance(axis, Const) and name in axis_values and axis.abbrev != "":
                parts.append(f"{name if axis.abbrev is None else axis.abbrev}{axis_values[name]}")
        return "_".join(parts)

    def definition(self, fi_api: str, arguments: dict[str, Any], name: str | None = None) -> dict[str, Any]:
        """The definition of a call, in flashinfer-bench's form.

        Parameters
        ----------
        fi_api : str
            Where the function is, such as "flashinfer.norm.rmsnorm".
        arguments : dict
            Those of the call, by the names of their parameters or those of the template. Nothing is computed.
        name : str, optional
            That of `definition_name` by default.
        """
        lengths = self.axis_values(arguments)
        axes = {}
        for axis_name, axis in self.axes.items():
            axes[axis_name] = {"type": "var" if isinstance(axis, Var) else "const"}
            if isinstance(axis, Const) and axis_name in lengths:
                axes[axis_name]["value"] = lengths[axis_name]
            _note(axes[axis_name], axis)
        found = {
            "name": self.definition_name(lengths) if name is None else name,
            "description": self.description,
            "op_type": self.op_type,
            "tags": [f"fi_api:{fi_api}", *self.tags],
            "axes": axes,
        }
        if self.constraints:
            found["constraints"] = self.constraints
        found["inputs"] = {key: self._shown(key, part, arguments, False) for key, part in self.inputs.items()}
        found["outputs"] = {key: self._shown(key, part, arguments, True) for key, part in self.outputs.items()}
        for key, function in (("reference", self.reference), ("check", self.check), ("init", self.init)):
            source = "" if function is None else _source_of(function)
            if source:
                found[key] = _IMPORTS + source
        return found

    def argument(self, name: str, arguments: dict[str, Any]):
        """The argument of a part of the template, or of a parameter."""
        part = self.inputs.get(name) or self.outputs.get(name)
        value = arguments.get(name)
        if part is not None and part.param is not None and part.param in arguments:
            value = arguments[part.param]
        if not isinstance(part, Tensor) or (index := part.tuple_idx) is None:
            return value
        if isinstance(value, torch.Tensor) and value.dim() == len(part.dim_names) + 1 and index < value.shape[1]:
            # One tensor has the tuple's along a second dimension, as caches of keys and values do.
            return value.select(1, index)
        return value[index] if isinstance(value, (tuple, list)) and index < len(value) else None

    def _shown(self, key: str, part: Tensor | Scalar, arguments, result: bool) -> dict[str, Any]:
        entry: dict[str, Any] = {"shape": None, "dtype": part.dtype}
        if isinstance(part, Tensor):
            entry = {"shape": part.dim_names, "dtype": self._dtype(key, part, arguments, result)}
        if part.optional:
            entry["optional"] = True
        if result and part.param is not None:
            entry["param"] = part.param
        return _note(entry, part)

    def _dtype(self, key: str, part: Tensor, arguments, result: bool) -> str:
        given = None if result else self.argument(key, arguments)
        if result and part.dtype_from is not None:
            given = next((self.argument(name, arguments) for name, known in self.inputs.items()
                          if part.dtype_from in (name, known.param)), None)  # fmt: skip
        elif result and part.dtype is None:
            beside = (self.argument(name, arguments) for name, known in self.inputs.items()
                      if isinstance(known, Tensor) and set(known.dim_names) & set(part.dim_names))  # fmt: skip
            given = next((x for x in beside if isinstance(x, torch.Tensor)), None)
        if isinstance(given, torch.Tensor):
            return _name_of(given.dtype)
        said = arguments.get(part.dtype_from_scalar) if part.dtype_from_scalar else None
        return _name_of(said) if isinstance(said, torch.dtype) else part.dtype or "unknown"


def write(definition: dict[str, Any], folder: str | Path) -> Path:
    """Write a definition as `<name>.json`."""
    path = Path(folder) / f"{definition['name']}.json"
    require(path.parent == Path(folder), "name", definition["name"], "a name without folders")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(definition, indent=2))
    return path


def _source_of(function: Callable) -> str:
    """The source, after those of its helpers; "" where there is none, of what was typed into an interpreter or is no
    Python function."""
    try:
        parts = [*getattr(function, "_trace_reference_dependencies", ()), function]
        return "\n\n".join(inspect.getsource(part) for part in parts)
    except (OSError, TypeError):
        return ""


def _note(entry: dict[str, Any], part) -> dict[str, Any]:
    if part.description:
        entry["description"] = part.description
    return entry


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
