"""The registry of losses: what each is called, what it needs, which parameters it takes and within which bounds."""

from __future__ import annotations

import inspect
import math
import operator
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import annotated_types as at
from torch import Tensor

from preftune.errors import ConfigError, nearest
from preftune.types import Layout

# The bounds of common parameters, once. pydantic reads the same annotations for the configuration's schema.
Beta = Annotated[float, at.Gt(0)]
Smoothing = Annotated[float, at.Ge(0), at.Lt(0.5)]
NonNegative = Annotated[float, at.Ge(0)]

Denominator = Literal["examples", "completion_tokens"]


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter of a loss: its default and the annotation that carries its bounds."""

    name: str
    annotation: Any
    default: float


@dataclass(frozen=True)
class LossSpec:
    """What the registry knows of a loss; see `register` for the fields."""

    name: str
    function: Callable[..., Tensor]
    layout: Layout
    needs_reference: bool
    needs_kl_baseline: bool
    denominator: Denominator
    parameters: Mapping[str, Parameter]

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").splitlines()[0]


@dataclass(frozen=True)
class Loss:
    """A loss with its parameters bound: call it like the registered function, without the keywords."""

    spec: LossSpec
    parameters: Mapping[str, float]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def beta(self) -> float:
        """What turns log-ratios into rewards; 1 for a loss without beta."""
        return self.parameters.get("beta", 1.0)

    def __call__(self, *args: Any) -> Tensor:
        return self.spec.function(*args, **self.parameters)

    def describe(self) -> dict[str, Any]:
        """Name and parameters, as saved with a checkpoint and compared on resume."""
        return {"name": self.name, **self.parameters}


_REGISTRY: dict[str, LossSpec] = {}


def register(
    name: str,
    *,
    layout: Layout,
    needs_reference: bool = True,
    needs_kl_baseline: bool = False,
    denominator: Denominator = "examples",
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Put a function on the list of losses.

    The function's keyword-only arguments are its parameters; each is annotated with its bounds and has a default.
    A paired loss is called as `f(chosen, rejected)`, an unpaired one as `f(completions, labels)`, and one that needs a
    KL baseline as `f(completions, labels, z_ref)`; the groups are `SequenceLogps`. It returns one value per example.

    Args:
        name: the name in configs and in `make_loss`.
        layout: the kind of rows it takes.
        needs_reference: it reads log-ratios, so a run without a reference is refused.
        needs_kl_baseline: it takes `z_ref`, estimated from mismatched pairs over the whole step.
        denominator: the step's count that the sum of its values is divided by.
    """

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = {
            p.name: Parameter(p.name, hints[p.name], p.default)
            for p in inspect.signature(function).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        if name in _REGISTRY:
            raise ConfigError(f"a loss named {name!r} is registered already; choose another name")
        _REGISTRY[name] = LossSpec(
            name, function, layout, needs_reference, needs_kl_baseline, denominator, MappingProxyType(parameters)
        )
        return function

    return add


def loss_names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_REGISTRY)


def get_spec(name: str) -> LossSpec:
    """Return what is registered under `name`; raises `ConfigError` with the nearest name."""
    if name not in _REGISTRY:
        raise ConfigError(f"unknown loss {name!r}{nearest(name, _REGISTRY)} (there are: {', '.join(loss_names())})")
    return _REGISTRY[name]


def make_loss(name: str, **parameters: Any) -> Loss:
    """Return the loss `name` with its parameters bound and checked.

    Raises `ConfigError` for an unknown name, a parameter the loss does not use (with the losses that do), or a value
    out of bounds.
    """
    spec = get_spec(name)
    for key in parameters:
        if key not in spec.parameters:
            raise ConfigError(f"loss.{key}: {_unused(spec, key)}")
    bound = {key: parameters.get(key, p.default) for key, p in spec.parameters.items()}
    for key, value in bound.items():
        _check_bounds(f"loss.{key}", value, spec.parameters[key].annotation)
    return Loss(spec, MappingProxyType({key: float(value) for key, value in bound.items()}))


def _unused(spec: LossSpec, key: str) -> str:
    users = [other.name for other in _REGISTRY.values() if key in other.parameters]
    if users:
        return f"{spec.name} does not use it; the losses that do: {', '.join(sorted(users))}"
    takes = ", ".join(spec.parameters)
    return f"{spec.name} has no such parameter{nearest(key, spec.parameters)} (it takes: {takes})"


def _check_bounds(where: str, value: Any, annotation: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, got {value!r}")
    holds: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
        "gt": (">", operator.gt),
        "ge": (">=", operator.ge),
        "lt": ("<", operator.lt),
        "le": ("<=", operator.le),
    }
    for bound in typing.get_args(annotation)[1:]:
        for attribute, (sign, compare) in holds.items():
            limit = getattr(bound, attribute, None)
            if limit is not None and not compare(value, limit):
                raise ConfigError(f"{where}: must be {sign} {limit}, got {value}")
