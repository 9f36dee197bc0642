"""nn.Module twins made from the functions: the same keyword arguments, stored once.

Tensor arguments become buffers (parameters stay parameters), so they follow ``.to(device)`` and are saved in the state dict.
Arguments that belong to a batch (sample_weight, mask, ...) may be given to the constructor or to each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LossModule(torch.nn.Module):
    """Base of all loss modules; `function` is the loss that `forward` calls."""

    function: Callable[..., Any]

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        bound = inspect.signature(type(self)).bind(**arguments)
        bound.apply_defaults()
        self._names = tuple(bound.arguments)
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        stored = {name: getattr(self, name) for name in self._names if name not in arguments}
        return type(self).function(*inputs, **stored, **arguments)

    def extra_repr(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        shown = []
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=Tensor{tuple(value.shape)}")
            elif value != defaults[name].default:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


def module_of(function: Callable[..., Any], name: str) -> type[LossModule]:
    """The module twin of `function`, named `name`."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    summary = (function.__doc__ or "").strip().splitlines()[0]
    members = {
        "function": staticmethod(function),
        "__module__": function.__module__,
        "__signature__": inspect.Signature(keywords),
        "__doc__": f"{summary}\n\nModule form of `{function.__name__}`, which documents the arguments.",
    }
    return type(name, (LossModule,), members)
