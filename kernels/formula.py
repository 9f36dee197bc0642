"""How a loss presents itself to its family: its formula, what a row saves, and its scalars as numbers and options."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Arguments(NamedTuple):
    """A loss's scalars as the kernels take them."""

    numbers: tuple[float, ...] = ()  #: k of the formula, any value without a new compilation
    options: tuple[Any, ...] = ()  #: OPTIONS of the formula, compiled in
    features: dict[str, Any] = {}  #: other constants of the family's kernels


class Formula(NamedTuple):
    family: str  #: module of this package
    row: Any  #: the @triton.jit formula
    saved: int  #: numbers a row saves for backward
    arguments: Callable[..., Arguments]  #: the scalars of the loss's `pack` -> Arguments
    entry: Any = None  #: a second @triton.jit formula, of one class, for families that have one


def formula_of(kernel: str) -> Formula:
    return import_module(f".losses.{kernel}", __package__).FORMULA
