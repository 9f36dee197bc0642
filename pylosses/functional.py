"""Every loss as a function, like `torch.nn.functional`: ``import pylosses.functional as F``."""

from .linear import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from .linear import LinearHEMLoss as LinearHEMLoss
from .linear import linear_cross_entropy as linear_cross_entropy
from .linear import linear_hem_loss as linear_hem_loss
from .linear import linear_loss as linear_loss
from .losses import *  # noqa: F403
from .metrics import auroc as auroc
from .metrics import dar as dar
from .metrics import ece as ece
from .scores import ConfidenceScores as ConfidenceScores
from .scores import confidence_scores as confidence_scores
