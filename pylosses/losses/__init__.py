"""One file per loss: maths, Convention docstring, plain reference, SPEC, public function and module. One import a loss."""

from .adr import ADRLoss, adr_loss
from .contrastive_margin import ContrastiveMarginLoss, contrastive_margin_loss
from .cross_entropy import CrossEntropyLoss, cross_entropy
from .cross_entropy_adr import CrossEntropyADRLoss, cross_entropy_adr
from .dice import DiceLoss, dice_loss
from .dice_ce import DiceCELoss, dice_ce_loss
from .entropy import EntropyLoss, entropy_loss
from .feature_contrastive import FeatureContrastiveLoss, feature_contrastive_loss
from .focal import FocalLoss, focal_loss
from .hem import HEMLoss, hem_loss, hem_margins
from .info_nce import InfoNCELoss, info_nce_loss
from .knl import KNLLoss, knl_loss
from .logit_adjusted import LogitAdjustedLoss, logit_adjusted_loss
from .logit_norm import LogitNormLoss, logit_norm_loss
from .multi_margin import MultiMarginLoss, multi_margin_loss
from .sparse_cl import SparseCLLoss, sparse_cl_loss
from .target import TargetLoss, target_loss
from .tta import TTALoss, tta_loss
from .utility_perturbation import utility_perturbation

__all__ = [
    "adr_loss", "ADRLoss", "contrastive_margin_loss", "ContrastiveMarginLoss", "cross_entropy", "cross_entropy_adr",
    "CrossEntropyADRLoss", "CrossEntropyLoss", "dice_ce_loss", "dice_loss", "DiceCELoss", "DiceLoss", "entropy_loss",
    "EntropyLoss", "feature_contrastive_loss", "FeatureContrastiveLoss", "focal_loss", "FocalLoss", "hem_loss",
    "hem_margins", "HEMLoss", "info_nce_loss", "InfoNCELoss", "knl_loss", "KNLLoss", "logit_adjusted_loss",
    "logit_norm_loss", "LogitAdjustedLoss", "LogitNormLoss", "multi_margin_loss", "MultiMarginLoss", "sparse_cl_loss",
    "SparseCLLoss", "target_loss", "TargetLoss", "tta_loss", "TTALoss", "utility_perturbation",
]  # fmt: skip
