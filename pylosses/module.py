"""nn.Module twins of the functions: the same arguments, stored once.

    class FocalLoss(LossModule):
        @arguments_of(focal_loss)
        def __init__(self) -> None: ...

Tensor arguments become buffers (parameters stay parameters), so they follow ``.to(device)`` and are saved in the state dict.
Arguments that belong to a batch (sample_weight, mask, ...) may be given to the constructor or to each call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, overload

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
#: Turns the body of an `__init__` into one that takes the arguments of a function.
Initialiser = Callable[[Callable[[Any], None]], Callable[Concatenate[Any, Arguments], None]]


class LossModule(torch.nn.Module):
    """Base of all loss modules; `function` is the loss that `forward` calls."""

    function: Callable[..., Tensor]

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._names = tuple(arguments)
        for name, value in arguments.items():
            if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def __init_subclass__(cls) -> None:
        function = getattr(cls.__init__, "function", None)
        if function is not None:  # else the subclass has an __init__ of its own and its parent's function
            cls.function = staticmethod(function)

    def forward(self, *inputs: Tensor, **arguments: Any) -> Tensor:
        stored = {name: getattr(self, name) for name in self._names if name not in arguments}
        return type(self).function(*inputs, **stored, **arguments)

    if TYPE_CHECKING:  # torch's own says that anything may come and go

        def __call__(self, *inputs: Tensor, **arguments: Any) -> Tensor: ...

    def extra_repr(self) -> str:
        defaults = inspect.signature(type(self).function).parameters
        shown = []
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=Tensor{tuple(value.shape)}")
            elif value != defaults[name].default:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


@overload
def arguments_of(function: Callable[Concatenate[Tensor, Arguments], Tensor], after: Literal[1]) -> Initialiser[Arguments]: ...
@overload
def arguments_of(
    function: Callable[Concatenate[Tensor, Tensor, Arguments], Tensor], after: Literal[2] = 2
) -> Initialiser[Arguments]: ...
@overload
def arguments_of(
    function: Callable[Concatenate[Tensor, Tensor, Tensor, Arguments], Tensor], after: Literal[3]
) -> Initialiser[Arguments]: ...
def arguments_of(function: Callable[..., Tensor], after: int = 2) -> Any:
    """Decorates the `__init__` of the module twin of `function`: it takes what comes after the tensors of a call.

    The body runs when the arguments are stored. Type checkers see the arguments themselves.
    """
    parameters = inspect.signature(function).parameters.values()
    signature = inspect.Signature(list(parameters)[after:])
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def decorate(body: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(body)
        def initialise(self: LossModule, /, *args: Any, **arguments: Any) -> None:
            try:
                bound = signature.bind(*args, **arguments)
            except TypeError as error:
                raise TypeError(
                    f"{type(self).__name__}: {error}; its arguments are {', '.join(signature.parameters)}"
                ) from None
            bound.apply_defaults()
            LossModule.__init__(self, **bound.arguments)
            body(self)

        initialise.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
        initialise.function = function  # type: ignore[attr-defined]
        return initialise

    return decorate
