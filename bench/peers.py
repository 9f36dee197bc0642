"""Other libraries: which of their losses equals which of ours, and how both must be called for that.

A peer is a stated equality, ``theirs == ours(..., **arguments)``: the text of their call is what is called. The bench times it
after its gate has checked the equality, `parity` prints it as a table, and a test checks it wherever the library is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

#: What a call takes, by our loss; (x, y) else.
INPUTS = {"linear_cross_entropy": "h, w, y", "info_nce": "a, b", "entropy": "x"}


@dataclass(frozen=True)
class Peer:
    """One loss of one library."""

    library: str  #: name on PyPI, "torch" for PyTorch's own
    module: str  #: what has to be imported
    loss: str  #: name of ours
    function: str  #: an expression in that module, evaluated once
    call: str = "f(x, y)"  #: with f as the function and the inputs of the loss
    arguments: Mapping[str, Any] = field(default_factory=dict)  #: what ours needs to compute the same number
    kinds: tuple[str, ...] = ("rows", "pixels")  #: of shapes it takes
    dims: tuple[int, ...] = ()  #: numbers of dimensions of x it takes; empty: any
    half: bool = True  #: takes bfloat16 and float16
    device: str = "any"  #: or "cuda"
    single: bool = False  #: computes in float32 whatever comes in
    timed: bool = True  #: False: the same code as another row, with other arguments
    note: str = ""

    @property
    def theirs(self) -> str:
        """The call as a user would write it."""
        return self.call.replace("f(", f"{'F.' if self.library == 'torch' else ''}{self.function}(")

    def load(self) -> tuple[Callable[..., Tensor] | None, str | None]:
        """(the call, None), or (None, why it cannot be made here)."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return None, "needs CUDA"
        try:
            function = eval(self.function, dict(vars(_imported(self.module))))
        except ModuleNotFoundError as error:
            if error.name == self.module.partition(".")[0]:
                return None, f"not installed: pip install {self.library}"
            return None, f"cannot be imported: {error}"
        except Exception as error:  # a peer that is installed but broken is reported, not raised
            return None, f"cannot be imported: {type(error).__name__}: {error}"
        inputs = INPUTS.get(self.loss, "x, y")
        if self.call == f"f({inputs})":
            return function, None
        return eval(f"lambda {inputs}: {self.call}", {"f": function, "torch": torch, "math": math}), None

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


def softmax_entropy(x: Tensor) -> Tensor:
    """As the repositories of TENT and SAR have it, which are no packages."""
    return -(x.softmax(1) * x.log_softmax(1)).sum(1)


PIXELS, ROWS, LINEAR = ("pixels",), ("rows",), ("linear",)
BY_CLASS = "softmax=True, to_onehot_y=True"
EXACT = f"{BY_CLASS}, batch=True, smooth_nr=0, smooth_dr=0"
SMOOTH = {"label_smoothing": 0.1}
OWN_MEAN = "its mean also divides by C"
PAPER = "published in its repository, not a package"

_torch = partial(Peer, "torch", "torch.nn.functional")
_smp = partial(Peer, "segmentation-models-pytorch", "segmentation_models_pytorch.losses", kinds=PIXELS)
_monai = partial(Peer, "monai", "monai.losses", call="f(x, y[:, None])", kinds=PIXELS)
_kornia = partial(Peer, "kornia", "kornia.losses")
_liger = partial(Peer, "liger-kernel", "liger_kernel.transformers.functional", device="cuda")

PEERS: tuple[Peer, ...] = (
    _torch("cross_entropy", "cross_entropy"),
    _torch("cross_entropy", "cross_entropy", "f(x, y, label_smoothing=0.1)", SMOOTH, timed=False),
    _torch("multi_margin", "multi_margin_loss", kinds=ROWS, half=False),
    _torch("multi_margin", "multi_margin_loss", "f(x, y, p=2, margin=0.5)", {"power": 2.0, "margin": 0.5}, ROWS, half=False,
           timed=False),
    _torch("linear_cross_entropy", "linear_cross_entropy", "f(h, w, y)", kinds=LINEAR),
    _torch("linear_cross_entropy", "linear_cross_entropy", "f(h, w, y, options=torch.nn.LinearCrossEntropyOptions())",
           kinds=LINEAR, note="chunked"),
    _smp("dice", 'DiceLoss("multiclass")', arguments={"absent": "zero"}),
    _smp("dice", 'DiceLoss("multiclass", smooth=0.5)', arguments={"absent": "zero", "smooth": 1.0}, timed=False,
         note="its smooth counts twice"),
    _smp("cross_entropy", "SoftCrossEntropyLoss(smooth_factor=0.1)", arguments=SMOOTH,
         note="without ignored pixels: its mean divides by all of them"),
    _monai("dice", f"DiceLoss({EXACT})"),
    _monai("dice", f"DiceLoss({BY_CLASS})", arguments={"over": "image", "smooth": 1e-5}, timed=False),
    _monai("dice_ce", f"DiceCELoss({EXACT})"),
    _monai("dice_ce", f"DiceCELoss({BY_CLASS}, lambda_dice=0.7, lambda_ce=0.3)", timed=False,
           arguments={"over": "image", "smooth": 1e-5, "dice_weight": 0.7, "ce_weight": 0.3}),
    _monai("focal", "FocalLoss(use_softmax=True, to_onehot_y=True)", call="x.shape[1] * f(x, y[:, None])", single=True,
           note=OWN_MEAN),
    _kornia("focal", "focal_loss", 'x.shape[1] * f(x, y, alpha=None, reduction="mean")', note=OWN_MEAN),
    _kornia("focal", "focal_loss", 'f(x, y, alpha=None, gamma=0.5, reduction="sum")', {"gamma": 0.5, "reduction": "sum"},
            timed=False),
    _kornia("dice", "dice_loss", 'f(x, y, average="macro", eps=0.0)', {"over": "image", "absent": "exclude"}, PIXELS, (4,)),
    _kornia("target", "dice_loss", 'f(x, y, average="micro", eps=0.0)', {"kind": "mae"}, PIXELS, (4,), timed=False,
            note="pooling the classes makes Dice the mean of 1 - p_y: not a class Dice"),
    Peer("timm", "timm.loss", "cross_entropy", "LabelSmoothingCrossEntropy(0.1)", arguments=SMOOTH, kinds=ROWS),
    Peer("TENT", __name__, "entropy", "softmax_entropy", "f(x).mean()", timed=False, note=PAPER),
    Peer("SAR", __name__, "entropy", "softmax_entropy", "(e := f(x))[e < 0.4 * math.log(1000)].mean()",
         {"max_entropy": 0.4 * math.log(1000)}, timed=False, note=f"{PAPER}; NaN where nothing is kept, ours is 0"),
    Peer("pytorch-metric-learning", "pytorch_metric_learning.losses", "info_nce", "NTXentLoss(0.07)",
         "(f(a, i := torch.arange(len(a)), ref_emb=b, ref_labels=i.clone()) + f(b, i, ref_emb=a, ref_labels=i.clone())) / 2",
         kinds=("contrastive",)),
    _liger("cross_entropy", "liger_cross_entropy", kinds=ROWS, note="overwrites its input"),
    _liger("linear_cross_entropy", "liger_fused_linear_cross_entropy", "f(h, w, y)", kinds=LINEAR),
    Peer("quack-kernels", "quack", "cross_entropy", "cross_entropy", 'f(x, y, reduction="mean")', kinds=ROWS, device="cuda"),
    Peer("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy", "linear_cross_entropy", "f(h, w, y)", kinds=LINEAR,
         device="cuda"),
)  # fmt: skip

#: Losses of the same name that no arguments make equal: (library, their call, loss, why).
DIFFERENT: tuple[tuple[str, str, str, str], ...] = (
    ("segmentation-models-pytorch", 'FocalLoss("multiclass")', "focal",
     "C sigmoid focal losses, one against the rest, averaged; ours is one softmax"),
    ("pytorch-metric-learning", "SelfSupervisedLoss(NTXentLoss())", "info_nce",
     "other rows of the same batch are negatives too (2N - 1 of them, SimCLR); ours has the N rows of the other batch"),
)  # fmt: skip
