"""What a choice depends on: the shapes of the inputs, with dimensions that vary put into buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

Shapes = tuple[tuple[int, ...], ...]


class TunableRunner(ABC):
    """One implementation, which has tactics. Its class's name stands for it in what is kept.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.autotuner import AutoTuner, TunableRunner, TuningConfig
    >>> class Doubled(TunableRunner):
    ...     def get_valid_tactics(self, inputs, profile):
    ...         return [0]
    ...
    ...     def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
    ...         return None if do_preparation else 2 * inputs[0]
    >>> runner, tactic = AutoTuner.get().choose_one("doubled", [Doubled()], TuningConfig(), [torch.ones(1)])
    >>> runner([torch.ones(1)], tactic=tactic)
    tensor([2.])
    """

    @abstractmethod
    def get_valid_tactics(self, inputs: list, profile) -> list:
        """Tactics for the shapes of the inputs. -1 always is one, and need not be named.

        Parameters
        ----------
        inputs : list
            Tensors, numbers and None.
        profile
            Their shapes, with those that vary put into buckets.

        Returns
        -------
        list
            ints, or tuples of such.

        Raises
        ------
        Exception
            Up to the implementation.
        """

    @abstractmethod
    def forward(self, inputs: list, tactic=-1, do_preparation: bool = False, **kwargs):
        """Compute.

        Parameters
        ----------
        inputs : list
            As in `get_valid_tactics`.
        tactic
            One of those; -1 is the default of the implementation.
        do_preparation : bool
            Do what has to be done once, and return nothing.
        **kwargs
            As given to `AutoTuner.choose_one`.

        Returns
        -------
        torch.Tensor or sequence of torch.Tensor
            The results, by which tactics are compared.

        Raises
        ------
        Exception
            A tactic that raises is left out.
        """

    def __call__(self, inputs: list, **kwargs):
        return self.forward(inputs, **kwargs)

    def get_cache_key_extras(self, inputs: list) -> tuple:
        """What a choice depends on beside shapes.

        Parameters
        ----------
        inputs : list
            As in `get_valid_tactics`.

        Returns
        -------
        tuple
            Numbers, strings and None; () by default.
        """
        return ()


@dataclass(frozen=True)
class DynamicTensorSpec:
    """A dimension that varies from call to call.

    Attributes
    ----------
    input_idx, dim_idx : tuple of int
        Inputs that have it, and which dimension it is of each.
    gen_tuning_buckets : tuple of int, or callable
        The sizes to tune for; a callable makes them of the size at hand.
    map_to_tuning_buckets : callable
        The size tuned for that stands for a size.
    tensor_initializers : sequence of callable, optional
        Makes each of these inputs for tuning: (shape, dtype, device) -> tensor. Default: random numbers, zeros of
        integers.
    """

    input_idx: tuple[int, ...]
    dim_idx: tuple[int, ...]
    gen_tuning_buckets: tuple[int, ...] | Callable[[int], Sequence[int]]
    map_to_tuning_buckets: Callable[[int], int]
    tensor_initializers: Sequence[Callable] | None = None


@dataclass(frozen=True)
class ConstraintSpec:
    """A dimension that follows from the shapes.

    Attributes
    ----------
    input_idx, dim_idx : int
        The input that has it, and which dimension it is.
    infer_shape : callable (shapes) -> int
        Its size, by the shapes of all inputs.
    """

    input_idx: int
    dim_idx: int
    infer_shape: Callable[[Shapes], int]


@dataclass(frozen=True)
class TuningConfig:
    """Which dimensions vary from call to call, and how inputs are made for tuning.

    Attributes
    ----------
    dynamic_tensor_specs : tuple of DynamicTensorSpec
        Dimensions that vary.
    constraint_specs : tuple of ConstraintSpec
        Dimensions that follow from those.
    tensor_initializers : tuple of (int, callable)
        An input's index, and what makes it: (shape, dtype, device) -> tensor.
    """

    dynamic_tensor_specs: tuple[DynamicTensorSpec, ...] = ()
    constraint_specs: tuple[ConstraintSpec, ...] = ()
    tensor_initializers: tuple[tuple[int, Callable], ...] = ()


@dataclass(frozen=True)
class Buckets:
    """What `autotune(tuning_buckets=..., round_up=...)` puts in place of each spec's own buckets; None leaves them."""

    sizes: tuple[int, ...] | None = None
    round_up: bool | None = None

    def of(self, spec: DynamicTensorSpec, size: int) -> tuple[int, ...]:
        sizes = self.sizes
        if sizes is None:
            sizes = spec.gen_tuning_buckets
            sizes = sizes(size) if callable(sizes) else sizes
        return tuple(sorted(set(map(int, sizes))))

    def mapping(self, spec: DynamicTensorSpec) -> Callable[[int], int]:
        if self.sizes is None and self.round_up is None:
            return spec.map_to_tuning_buckets

        def to_bucket(size: int) -> int:
            sizes = self.of(spec, size)
            place = bisect_left(sizes, size) if self.round_up else bisect_right(sizes, size) - 1
            return sizes[min(max(place, 0), len(sizes) - 1)]

        return to_bucket


def shapes_of(inputs: Sequence) -> Shapes:
    """The shape of each input, () of what is no tensor."""
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in inputs)


def profile_of(shapes: Sequence, config: TuningConfig, buckets: Buckets) -> Shapes:
    """The shapes that a choice for `shapes` is kept under."""
    sizes = []
    for spec in config.dynamic_tensor_specs:
        sizes.append(buckets.mapping(spec)(shapes[spec.input_idx[0]][spec.dim_idx[0]]))
    return _with_sizes(shapes, config, sizes)


def profiles_to_tune(shapes: Sequence, config: TuningConfig, buckets: Buckets) -> Iterator[Shapes]:
    """Those of every combination of buckets, and that of `shapes`, which comes first."""
    here = profile_of(shapes, config, buckets)
    yield here
    per_spec = []
    for spec in config.dynamic_tensor_specs:
        per_spec.append(buckets.of(spec, shapes[spec.input_idx[0]][spec.dim_idx[0]]))
    for sizes in product(*per_spec):
        profile = _with_sizes(shapes, config, sizes)
        if profile != here:
            yield profile


def _with_sizes(shapes, config, sizes) -> Shapes:
    changed = [list(shape) for shape in shapes]
    for spec, size in zip(config.dynamic_tensor_specs, sizes, strict=True):
        for i, d in zip(spec.input_idx, spec.dim_idx, strict=True):
            changed[i][d] = size
    for constraint in config.constraint_specs:
        changed[constraint.input_idx][constraint.dim_idx] = constraint.infer_shape(tuple(map(tuple, changed)))
    return tuple(map(tuple, changed))


def inputs_for(profile: Shapes, inputs: Sequence, config: TuningConfig) -> list:
    """The inputs, with tensors of other shapes allocated."""
    makers = dict(config.tensor_initializers or ())
    for spec in config.dynamic_tensor_specs:
        for i, make in zip(spec.input_idx, spec.tensor_initializers or (), strict=False):
            makers.setdefault(i, make)
    made = []
    for i, (shape, x) in enumerate(zip(profile, inputs, strict=True)):
        if not isinstance(x, torch.Tensor) or tuple(x.shape) == shape:
            made.append(x)
        elif i in makers:
            made.append(makers[i](shape, x.dtype, x.device))
        elif x.dtype.is_floating_point:
            made.append(torch.rand(shape, dtype=torch.float32, device=x.device).to(x.dtype))
        else:
            made.append(torch.zeros(shape, dtype=x.dtype, device=x.device))
    return made
