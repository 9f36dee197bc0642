"""Other libraries: which of their losses equals which of ours, and how both must be called for that.

A peer is a stated equality, ``theirs(x, y) == ours(x, y, **arguments)``. The bench times it after its gate has checked the
equality, `parity` prints it as a table, and a test checks it wherever the library is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Peer:
    """One loss of one library."""

    library: str  #: name on PyPI, "torch" for PyTorch's own
    module: str | None  #: what must be imported; None for a formula from a paper's repository that is no package
    loss: str  #: name of ours
    theirs: str  #: the call as a user would write it, with x, y (or a, b / h, w, y)
    make: Callable[[ModuleType], Callable[..., Tensor]]  #: imported module -> that call
    arguments: Mapping[str, Any] = field(default_factory=dict)  #: what ours needs to compute the same number
    kinds: tuple[str, ...] = ("rows", "pixels")  #: of shapes it takes
    dims: tuple[int, ...] = ()  #: numbers of dimensions of x it takes; empty: any
    half: bool = True  #: takes bfloat16 and float16
    device: str = "any"  #: or "cuda"
    single: bool = False  #: computes in float32 whatever comes in
    timed: bool = True  #: False: the same code as another row, with other arguments
    memory: Callable[[tuple[int, ...]], int] | None = None  #: bytes it needs for these sizes, if out of the ordinary
    note: str = ""

    def load(self) -> tuple[Callable[..., Tensor] | None, str | None]:
        """(the call, None), or (None, why it cannot be made here)."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return None, "needs CUDA"
        if self.module is None:
            return self.make(torch), None
        try:
            return self.make(_imported(self.module)), None
        except ModuleNotFoundError as error:
            if error.name == self.module.partition(".")[0]:
                return None, f"not installed: pip install {self.library}"
            return None, f"cannot be imported: {error}"
        except Exception as error:  # a peer that is installed but broken is reported, not raised
            return None, f"cannot be imported: {type(error).__name__}: {error}"

    def why_not(self, kind: str, dims: int, dtype: torch.dtype) -> str | None:
        """Why it cannot take such an input, or None."""
        if kind not in self.kinds:
            return f"takes {' or '.join(self.kinds)} only"
        if self.dims and dims not in self.dims:
            return f"takes input of {' or '.join(map(str, self.dims))} dimensions only"
        if not self.half and dtype in (torch.bfloat16, torch.float16):
            return f"does not take {str(dtype).removeprefix('torch.')}"
        return None


def _imported(name: str) -> ModuleType:
    """A module of a library; alone, if the whole library does not import: losses need no torchvision, their packages do."""
    try:
        return importlib.import_module(name)
    except Exception:
        package = name.partition(".")[0]
        spec = importlib.util.find_spec(package)
        if spec is None or package == name:
            raise
        sys.modules[package] = importlib.util.module_from_spec(spec)  # not executed
        try:
            return importlib.import_module(name)
        finally:
            del sys.modules[package]


def _with_channel(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """MONAI wants labels as (N, 1, *)."""
    return lambda x, y: loss(x, y.unsqueeze(1))


def _times_classes(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For libraries whose mean also divides by the number of classes."""
    return lambda x, y: x.shape[1] * loss(x, y)


def _both_directions(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Symmetric form of a loss of embeddings with reference embeddings."""

    def call(a: Tensor, b: Tensor) -> Tensor:
        y = torch.arange(len(a), device=a.device)
        pairs = y.clone()  # the library takes the same label tensor for the same embeddings, and drops the diagonal
        return (loss(a, y, ref_emb=b, ref_labels=pairs) + loss(b, y, ref_emb=a, ref_labels=pairs)) / 2

    return call


def _chunked_linear(nn: ModuleType) -> Callable[..., Tensor]:
    options = nn.LinearCrossEntropyOptions()
    return lambda h, w, y: F.linear_cross_entropy(h, w, y, options=options)


def _tent(x: Tensor) -> Tensor:
    return -(x.softmax(1) * x.log_softmax(1)).sum(1).mean()


def _sar(x: Tensor) -> Tensor:
    entropies = -(x.softmax(1) * x.log_softmax(1)).sum(1)
    return entropies[entropies < 0.4 * math.log(1000)].mean()


PEERS: tuple[Peer, ...] = (
    Peer("torch", "torch", "cross_entropy", "F.cross_entropy(x, y)", lambda torch: F.cross_entropy),
    Peer(
        "torch",
        "torch",
        "cross_entropy",
        "F.cross_entropy(x, y, label_smoothing=0.1)",
        lambda torch: lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        {"label_smoothing": 0.1},
        timed=False,
    ),
    Peer(
        "torch",
        "torch",
        "multi_margin",
        "F.multi_margin_loss(x, y)",
        lambda torch: F.multi_margin_loss,
        kinds=("rows",),
        half=False,
    ),
    Peer(
        "torch",
        "torch",
        "multi_margin",
        "F.multi_margin_loss(x, y, p=2, margin=0.5)",
        lambda torch: lambda x, y: F.multi_margin_loss(x, y, p=2, margin=0.5),
        {"power": 2.0, "margin": 0.5},
        kinds=("rows",),
        half=False,
        timed=False,
    ),
    Peer(
        "torch",
        "torch",
        "linear_cross_entropy",
        "F.linear_cross_entropy(h, w, y)",
        lambda torch: F.linear_cross_entropy,
        kinds=("linear",),
    ),
    Peer(
        "torch",
        "torch.nn",
        "linear_cross_entropy",
        "F.linear_cross_entropy(h, w, y, options=LinearCrossEntropyOptions())",
        _chunked_linear,
        kinds=("linear",),
        note="chunked",
    ),
    Peer(
        "segmentation-models-pytorch",
        "segmentation_models_pytorch.losses",
        "dice",
        'DiceLoss("multiclass")(x, y)',
        lambda smp: smp.DiceLoss("multiclass"),
        {"absent": "zero"},
        kinds=("pixels",),
    ),
    Peer(
        "segmentation-models-pytorch",
        "segmentation_models_pytorch.losses",
        "dice",
        'DiceLoss("multiclass", smooth=0.5)(x, y)',
        lambda smp: smp.DiceLoss("multiclass", smooth=0.5),
        {"absent": "zero", "smooth": 1.0},
        kinds=("pixels",),
        timed=False,
        note="its smooth counts twice",
    ),
    Peer(
        "segmentation-models-pytorch",
        "segmentation_models_pytorch.losses",
        "cross_entropy",
        "SoftCrossEntropyLoss(smooth_factor=0.1)(x, y)",
        lambda smp: smp.SoftCrossEntropyLoss(smooth_factor=0.1),
        {"label_smoothing": 0.1},
        kinds=("pixels",),
        note="without ignored pixels: its mean divides by all of them",
    ),
    Peer(
        "monai",
        "monai.losses",
        "dice",
        "DiceLoss(softmax=True, to_onehot_y=True, batch=True, smooth_nr=0, smooth_dr=0)(x, y[:, None])",
        lambda m: _with_channel(m.DiceLoss(softmax=True, to_onehot_y=True, batch=True, smooth_nr=0, smooth_dr=0)),
        kinds=("pixels",),
    ),
    Peer(
        "monai",
        "monai.losses",
        "dice",
        "DiceLoss(softmax=True, to_onehot_y=True)(x, y[:, None])",
        lambda m: _with_channel(m.DiceLoss(softmax=True, to_onehot_y=True)),
        {"over": "image", "smooth": 1e-5},
        kinds=("pixels",),
        timed=False,
    ),
    Peer(
        "monai",
        "monai.losses",
        "dice_ce",
        "DiceCELoss(softmax=True, to_onehot_y=True, batch=True, smooth_nr=0, smooth_dr=0)(x, y[:, None])",
        lambda m: _with_channel(m.DiceCELoss(softmax=True, to_onehot_y=True, batch=True, smooth_nr=0, smooth_dr=0)),
        kinds=("pixels",),
    ),
    Peer(
        "monai",
        "monai.losses",
        "dice_ce",
        "DiceCELoss(softmax=True, to_onehot_y=True, lambda_dice=0.7, lambda_ce=0.3)(x, y[:, None])",
        lambda m: _with_channel(m.DiceCELoss(softmax=True, to_onehot_y=True, lambda_dice=0.7, lambda_ce=0.3)),
        {"over": "image", "smooth": 1e-5, "dice_weight": 0.7, "ce_weight": 0.3},
        kinds=("pixels",),
        timed=False,
    ),
    Peer(
        "monai",
        "monai.losses",
        "focal",
        "C * FocalLoss(use_softmax=True, to_onehot_y=True)(x, y[:, None])",
        lambda m: _times_classes(_with_channel(m.FocalLoss(use_softmax=True, to_onehot_y=True))),
        kinds=("pixels",),
        single=True,
        note="its mean also divides by C",
    ),
    Peer(
        "kornia",
        "kornia.losses",
        "focal",
        'C * focal_loss(x, y, alpha=None, reduction="mean")',
        lambda k: _times_classes(lambda x, y: k.focal_loss(x, y, alpha=None, reduction="mean")),
        note="its mean also divides by C",
    ),
    Peer(
        "kornia",
        "kornia.losses",
        "focal",
        'focal_loss(x, y, alpha=None, gamma=0.5, reduction="sum")',
        lambda k: lambda x, y: k.focal_loss(x, y, alpha=None, gamma=0.5, reduction="sum"),
        {"gamma": 0.5, "reduction": "sum"},
        timed=False,
    ),
    Peer(
        "kornia",
        "kornia.losses",
        "dice",
        'dice_loss(x, y, average="macro", eps=0)',
        lambda k: lambda x, y: k.dice_loss(x, y, average="macro", eps=0.0),
        {"over": "image", "absent": "exclude"},
        kinds=("pixels",),
        dims=(4,),
    ),
    Peer(
        "kornia",
        "kornia.losses",
        "target",
        'dice_loss(x, y, average="micro", eps=0)',
        lambda k: lambda x, y: k.dice_loss(x, y, average="micro", eps=0.0),
        {"kind": "mae"},
        kinds=("pixels",),
        dims=(4,),
        timed=False,
        note="pooling the classes makes Dice the mean of 1 - p_y: not a class Dice",
    ),
    Peer(
        "timm",
        "timm.loss",
        "cross_entropy",
        "LabelSmoothingCrossEntropy(0.1)(x, y)",
        lambda timm: timm.LabelSmoothingCrossEntropy(0.1),
        {"label_smoothing": 0.1},
        kinds=("rows",),
    ),
    Peer(
        "TENT",
        None,
        "entropy",
        "softmax_entropy(x).mean()",
        lambda torch: _tent,
        timed=False,
        note="published in its repository, not a package; the eager provider is this formula",
    ),
    Peer(
        "SAR",
        None,
        "entropy",
        "entropies[entropies < 0.4 * math.log(1000)].mean()",
        lambda torch: _sar,
        {"max_entropy": 0.4 * math.log(1000)},
        timed=False,
        note="published in its repository, not a package; NaN where nothing is kept, ours is 0",
    ),
    Peer(
        "pytorch-metric-learning",
        "pytorch_metric_learning.losses",
        "info_nce",
        "(NTXentLoss(0.07)(a, i, ref_emb=b, ref_labels=j) + NTXentLoss(0.07)(b, i, ref_emb=a, ref_labels=j)) / 2",
        lambda pml: _both_directions(pml.NTXentLoss(0.07)),
        kinds=("contrastive",),
        memory=lambda sizes: 30 * sizes[0] ** 3,  # it compares every positive with every negative of the batch
        note="i = torch.arange(N), j = i.clone()",
    ),
    Peer(
        "liger-kernel",
        "liger_kernel.transformers.functional",
        "cross_entropy",
        "liger_cross_entropy(x, y)",
        lambda liger: lambda x, y: liger.liger_cross_entropy(x, y),
        kinds=("rows",),
        device="cuda",
        note="overwrites its input",
    ),
    Peer(
        "quack-kernels",
        "quack",
        "cross_entropy",
        'cross_entropy(x, y, reduction="mean")',
        lambda quack: lambda x, y: quack.cross_entropy(x, y, reduction="mean"),
        kinds=("rows",),
        device="cuda",
    ),
    Peer(
        "cut-cross-entropy",
        "cut_cross_entropy",
        "linear_cross_entropy",
        "linear_cross_entropy(h, w, y)",
        lambda cce: lambda h, w, y: cce.linear_cross_entropy(h, w, y),
        kinds=("linear",),
        device="cuda",
    ),
    Peer(
        "liger-kernel",
        "liger_kernel.transformers.functional",
        "linear_cross_entropy",
        "liger_fused_linear_cross_entropy(h, w, y)",
        lambda liger: lambda h, w, y: liger.liger_fused_linear_cross_entropy(h, w, y),
        kinds=("linear",),
        device="cuda",
    ),
)

#: Losses of the same name that no arguments make equal: (library, their call, loss, why).
DIFFERENT: tuple[tuple[str, str, str, str], ...] = (
    (
        "segmentation-models-pytorch",
        'FocalLoss("multiclass")',
        "focal",
        "C sigmoid focal losses, one against the rest, averaged; ours is one softmax",
    ),
    (
        "pytorch-metric-learning",
        "SelfSupervisedLoss(NTXentLoss())",
        "info_nce",
        "other rows of the same batch are negatives too (2N - 1 of them, SimCLR); ours has the N rows of the other batch",
    ),
)
