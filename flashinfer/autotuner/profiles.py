"""What a choice depends on: the shapes of the inputs, with dimensions that vary put into buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf

import torch

from flashinfer._core.checks import require

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StaticDim:
    """A dimension that is as it is.

    Attributes
    ----------
    val : int
        Its size.

    Examples
    --------
    >>> from flashinfer.autotuner import StaticDim
    >>> StaticDim(64).val
    64
    """

    val: int


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that varies, or follows from one that does.

    Attributes
    ----------
    min, opt, max : int or float
        The sizes that a bucket is for: from `min`, which is `opt`, the size tuned for, to below `max`, the next bucket.

    Examples
    --------
    >>> from flashinfer.autotuner import DynamicDim
    >>> DynamicDim(8, 8, 16).opt
    8
    """

    min: int
    opt: int
    max: float


Dim = DynamicDim | StaticDim


@dataclass
class OptimizationProfile:
    """The shapes that a choice is made for.

    Attributes
    ----------
    shapes : list of list of Dim
        Of each input; [StaticDim(0)] of what is no tensor.
    tensor_initializers : list of (callable or None)
        What makes each input for tuning, if the config says it.

    Examples
    --------
    >>> from flashinfer.autotuner import DynamicDim, OptimizationProfile, StaticDim
    >>> OptimizationProfile([[DynamicDim(8, 8, 16), StaticDim(64)]]).get_opt_shapes()
    ((8, 64),)
    """

    shapes: list[list[Dim]]
    tensor_initializers: list[Callable | None] = field(default_factory=list)

    def get_opt_shapes(self) -> Shapes:
        """The shapes tuned for.

        Returns
        -------
        tuple of tuple of int
            Of each input.
        """
        return tuple(tuple(d.opt if isinstance(d, DynamicDim) else d.val for d in shape) for shape in self.shapes)

    def get_hash_key(self) -> Shapes:
        """What tells profiles apart: `get_opt_shapes`.

        Returns
        -------
        tuple of tuple of int
        """
        return self.get_opt_shapes()


def round_to_nearest_bucket(x: int, buckets: Sequence[int], round_map: bool = False) -> int:
    """The bucket of a size.

    Parameters
    ----------
    x : int
        The size.
    buckets : sequence of int
        In ascending order.
    round_map : bool
        True: the smallest that is not below `x`; else the largest that is not above. The last, or first, if there is
        none.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        No buckets.

    Examples
    --------
    >>> from flashinfer.autotuner import round_to_nearest_bucket
    >>> [round_to_nearest_bucket(350, (100, 200, 500), up) for up in (False, True)]
    [200, 500]
    """
    require(len(buckets) > 0, "buckets", "none", "one or more sizes")
    place = bisect_left(buckets, x) if round_map else bisect_right(buckets, x) - 1
    return buckets[min(max(place, 0), len(buckets) - 1)]


def make_bucket_mapper(buckets: Sequence[int], round_map: bool = False) -> Callable[[int], int]:
    """The mapping of sizes to buckets, as `DynamicTensorSpec.map_to_tuning_buckets`.

    Parameters
    ----------
    buckets : sequence of int
        In any order.
    round_map : bool
        As in `round_to_nearest_bucket`.

    Returns
    -------
    callable (int) -> int

    Raises
    ------
    ValueError
        No buckets.

    Examples
    --------
    >>> from flashinfer.autotuner import make_bucket_mapper
    >>> [make_bucket_mapper((500, 100, 200))(x) for x in (50, 350, 900)]
    [100, 200, 500]
    """
    require(len(buckets) > 0, "buckets", "none", "one or more sizes")
    return partial(round_to_nearest_bucket, buckets=tuple(sorted(set(buckets))), round_map=round_map)


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
        profile : OptimizationProfile
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
            Do what has to be done once before tactics are measured, and return nothing. A `forward` without this
            parameter has nothing to do.
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

    def precompile_tactics(self, inputs: list, tactics: list, profile, **kwargs) -> bool:
        """Compile what tactics need, before they are measured.

        Parameters
        ----------
        inputs, profile
            As in `get_valid_tactics`.
        tactics : list
            What that returned.
        **kwargs
            As given to `AutoTuner.choose_one`.

        Returns
        -------
        bool
            Whether there is nothing left for `forward` to prepare; False by default.

        Raises
        ------
        Exception
            A runner that raises is left out.
        """
        return False

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
    use_cold_l2_cache : bool
        Flush L2 before each call that is timed. A `MeasurementPolicy` may say otherwise.
    use_cuda_graph : bool
        Time replays of a CUDA graph. A `MeasurementPolicy` may say otherwise.
    cuda_graph_profile_replays : int
        With `use_cuda_graph`: replays for each repeat.
    profiling_repeat : int, optional
        Repeats; default: the tuner's.
    use_cold_l2_graph_replay : bool
        A replay that is not timed before those that are. All have one here.
    value_aware_input_indices, profile_arena_input_indices : tuple of int
        Inputs whose contents, or addresses, upstream varies between calls. Here a call's inputs are those of the one
        before, so these have no effect.
    inputs_pre_hook : callable (list) -> list, optional
        Given the inputs of a profile as they were made, gives those to tune with.
    """

    dynamic_tensor_specs: tuple[DynamicTensorSpec, ...] = ()
    constraint_specs: tuple[ConstraintSpec, ...] = ()
    tensor_initializers: tuple[tuple[int, Callable], ...] = ()
    use_cold_l2_cache: bool = False
    use_cuda_graph: bool = False
    cuda_graph_profile_replays: int = 1
    profiling_repeat: int | None = None
    use_cold_l2_graph_replay: bool = False
    value_aware_input_indices: tuple[int, ...] = ()
    profile_arena_input_indices: tuple[int, ...] = ()
    inputs_pre_hook: Callable[[list], Sequence] | None = None


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
        if self.sizes is None and not self.round_up:
            return spec.map_to_tuning_buckets

        def to_bucket(size: int) -> int:
            sizes = self.of(spec, size)
            if self.sizes is None and callable(spec.gen_tuning_buckets):
                # The next power of 2, so that few sizes are tuned for.
                size = 1 << (size - 1).bit_length() if size > 0 else 1
            return round_to_nearest_bucket(size, sizes, bool(self.round_up))

        return to_bucket

    def applied(self, config: TuningConfig) -> TuningConfig:
        """The config with these buckets in its specs."""
        if self.sizes is None and not self.round_up:
            return config
        specs = config.dynamic_tensor_specs
        changed = [
            replace(spec, gen_tuning_buckets=self.sizes or spec.gen_tuning_buckets,
                    map_to_tuning_buckets=self.mapping(spec)) for spec in specs
        ]  # fmt: skip
        return replace(config, dynamic_tensor_specs=tuple(changed))


def shapes_of(inputs: Sequence) -> Shapes:
    """The shape of each input, (0,) of what is no tensor."""
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else (0,) for x in inputs)


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


def as_profile(shapes: Shapes, config: TuningConfig, buckets: Buckets) -> OptimizationProfile:
    """The shapes of a profile with what is known of their dimensions."""
    dims: list[list[Dim]] = [[StaticDim(size) for size in shape] for shape in shapes]
    for spec in config.dynamic_tensor_specs:
        size = shapes[spec.input_idx[0]][spec.dim_idx[0]]
        sizes = buckets.of(spec, size)
        place = bisect_right(sizes, size)
        largest = sizes[place] if place < len(sizes) else inf
        for i, d in zip(spec.input_idx, spec.dim_idx, strict=True):
            dims[i][d] = DynamicDim(size, size, largest)
    for constraint in config.constraint_specs:
        size = shapes[constraint.input_idx][constraint.dim_idx]
        dims[constraint.input_idx][constraint.dim_idx] = DynamicDim(size, size, size)
    makers = dict(config.tensor_initializers or ())
    return OptimizationProfile(dims, [makers.get(i) for i in range(len(shapes))])


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
