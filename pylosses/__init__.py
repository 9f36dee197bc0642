"""pylosses: fused classification losses for PyTorch.

>>> import torch, pylosses
>>> logits = torch.zeros(4, 10, requires_grad=True)
>>> loss = pylosses.hem_loss(logits, torch.tensor([1, 2, 3, -100]))
>>> loss.backward()
"""

import typing as _typing
import warnings as _warnings

with _warnings.catch_warnings():  # pylosses does not need NumPy, so that there is none is no news
    _warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch as _torch  # noqa: F401

from . import compile as _compile  # noqa: F401  registers the ops: too late once torch.compile traces
from . import functional as functional
from .choice import BackendError as BackendError
from .choice import backends as backends
from .choice import use_backend as use_backend
from .functional import *  # noqa: F403
from .pool import clear_pool as clear_pool
from .pool import use_pool as use_pool
from .spec import LOSSES as LOSSES
from .spec import LossSpec as LossSpec

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from . import adapt as adapt
    from . import fcl as fcl
    from . import parallel as parallel
else:  # type checkers read the imports; whatever else is asked for does not exist
    __all__ = ["LOSSES", "adapt", "fcl", "functional", "parallel"]
    __all__ += [name for name, value in list(globals().items()) if callable(value) and not name.startswith("_")]

    def __getattr__(name: str) -> object:
        if name in ("adapt", "fcl", "parallel"):  # imported when first asked for: few need them, everybody waits for imports
            from importlib import import_module

            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*__all__, *(name for name in globals() if name.startswith("__"))]
