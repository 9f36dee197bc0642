"""pylosses: fused classification losses for PyTorch.

>>> import torch, pylosses
>>> logits = torch.zeros(4, 10, requires_grad=True)
>>> loss = pylosses.hem_loss(logits, torch.tensor([1, 2, 3, -100]))
>>> loss.backward()
"""

from . import compile as _compile  # noqa: F401  registers the ops: too late once torch.compile traces
from . import functional as functional
from .backends import BackendError as BackendError
from .backends import backends as backends
from .backends import use_backend as use_backend
from .linear import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from .linear import LinearHEMLoss as LinearHEMLoss
from .linear import linear_cross_entropy as linear_cross_entropy
from .linear import linear_hem_loss as linear_hem_loss
from .linear import linear_loss as linear_loss
from .losses import *  # noqa: F403
from .metrics import auroc as auroc
from .metrics import dar as dar
from .metrics import ece as ece
from .pool import clear_pool as clear_pool
from .pool import use_pool as use_pool
from .scores import ConfidenceScores as ConfidenceScores
from .scores import confidence_scores as confidence_scores
from .spec import LOSSES as LOSSES
from .spec import LossSpec as LossSpec

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "parallel":  # imported when it is first asked for: few need it, and everybody waits for an import
        from importlib import import_module

        return import_module(".parallel", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
