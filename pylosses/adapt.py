"""Test-time adaptation: a trained model that goes on learning from the unlabelled batches it is asked about.

`tent`, `eata` and `sar` wrap a model. Called like the model, the wrapper gives its logits and then adapts the norm layers'
weights and biases by a loss without labels, so that the next batch finds a better model:

    adapted = pylosses.adapt.sar(model, loss="tta")
    for images in stream:
        logits = adapted(images)  # of the model as it was; the model has moved when this returns

**Convention** of all three

- the model is the one that is given, not a copy: `configure` readies it. Its norm layers' weights and biases learn, nothing
  else does; BatchNorm uses the statistics of the batch, everything else is in evaluation mode. `reset()` brings the source's
  weights back.
- the logits are those of the forward before the update, detached; with several `steps`, of the last step's.
- a filter that keeps no row changes nothing: no weight, no momentum, no average.
- logits are (N, C) or (N, C, *), a segmenter's: there each pixel is a row. A model may also return an object with `logits`.
- `train()` and `eval()` of the wrapper leave the model as it was configured. `state_dict()` holds the model, the source's
  weights, the optimizer and the averages, so that an adaptation goes on where it was saved.
- works under `torch.no_grad()`, `torch.inference_mode()` and autocast (no loop scales its loss: float16 may lose small
  gradients, bfloat16 does not), and with compiled models. On an accelerator a loop with a filter waits for the device, to know
  whether a row is left.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from . import check, functional
from .spec import LOSSES

#: The rate of the published loops for batches of 64 images and a ResNet, by SGD with momentum 0.9.
RATE = 2.5e-4

#: The entropy below which the published loops call a row reliable, as a share of the largest entropy log C.
RELIABLE = 0.4

_NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm of any dimension, SyncBatchNorm, InstanceNorm
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def parameters(model: nn.Module, *, leave_out_last: bool = False) -> list[nn.Parameter]:
    """The parameters that adapt: weights and biases of the norm layers, in the order in which the model registers them.

    `leave_out_last=True` is SAR's choice: the last quarter of the norm layers stays as it is, which is none of fewer than four.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    >>> [tuple(p.shape) for p in pylosses.adapt.parameters(model)]
    [(4,), (4,)]
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _NORMS)]
    layers = [layer for layer in layers if any(p is not None for p in layer._parameters.values())]
    if leave_out_last:
        layers = layers[: len(layers) - len(layers) // 4]
    found = [p for layer in layers for p in layer.parameters(recurse=False)]
    if not found:
        raise ValueError(f"model must have a norm layer with a weight or a bias to adapt, got {type(model).__name__} with none")
    return found


def configure(model: nn.Module, *, leave_out_last: bool = False) -> nn.Module:
    """Ready `model`, in place, for adaptation: see the convention above; `leave_out_last` as in `parameters`.

    BatchNorm and InstanceNorm keep their running statistics, unused and unchanged: `load_state_dict` of the source still works.
    """
    adapting = parameters(model, leave_out_last=leave_out_last)
    model.eval().requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            layer.train()
            layer.track_running_stats = False
    for p in adapting:
        p.requires_grad_(True)
    return model


class Adaptation(nn.Module):
    """A model that adapts when it is called; made by `tent`, `eata` and `sar`."""

    leave_out_last = False

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[..., Tensor],
        optimizer: Optimizer | None,
        steps: int,
        episodic: bool,
        loss_arguments: dict[str, Any],
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        self.loss, self.loss_arguments = _unlabelled(loss, loss_arguments), loss_arguments
        self.steps, self.episodic = check.integer("steps", steps, least=1), bool(episodic)
        self.model = configure(model, leave_out_last=self.leave_out_last)
        self._adapting = parameters(model, leave_out_last=self.leave_out_last)
        for i, p in enumerate(self._adapting):
            self.register_buffer(f"source_{i}", p.detach().clone())
        self.optimizer = (optimizer or _sgd)(self._adapting)
        self._fresh = copy.deepcopy(self.optimizer.state_dict())

    def forward(self, *inputs: Any, **more: Any) -> Tensor:
        """Logits of the model as it is, which then adapts to this batch."""
        with torch.inference_mode(False), torch.enable_grad():
            inputs = tuple(map(_usable, inputs))
            more = {name: _usable(value) for name, value in more.items()}
            if self.episodic:
                self.reset()
            for _ in range(self.steps):
                logits = self._step(lambda: _logits(self.model(*inputs, **more)))
        return logits

    def reset(self) -> None:
        """The source's weights, a fresh optimizer, no memory of earlier batches."""
        with torch.no_grad():
            for p, source in zip(self._adapting, self._source(), strict=True):
                p.copy_(source)
        self.optimizer.load_state_dict(copy.deepcopy(self._fresh))

    def _source(self) -> list[Tensor]:
        return [getattr(self, f"source_{i}") for i in range(len(self._adapting))]

    def train(self, mode: bool = True) -> Adaptation:
        self.training = mode  # of the wrapper alone
        return self

    def get_extra_state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), **self._memory()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for name in self._memory():
            setattr(self, name, copy.deepcopy(state[name]))

    def _memory(self) -> dict[str, Any]:
        """What is remembered from batch to batch, by the name of its attribute."""
        return {}

    def _step(self, forward: Callable[[], Tensor]) -> Tensor:
        raise NotImplementedError

    def _descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Tent(Adaptation):
    def _step(self, forward: Callable[[], Tensor]) -> Tensor:
        logits = forward()
        limit = self.loss_arguments.get("max_entropy")
        if limit is None or bool((_entropies(logits) < limit).any()):
            self._descend(self.loss(logits))
        return logits.detach()


class Eata(Adaptation):
    def __init__(
        self, *arguments: Any, max_entropy: float | None, similarity: float, fisher: list[Tensor] | None, weight: float
    ) -> None:
        super().__init__(*arguments)
        self.max_entropy, self.similarity = _limit(max_entropy), similarity
        self.fisher, self.fisher_weight = fisher, weight
        self.probabilities: Tensor | None = None  # (C), moving average of the kept rows

    def _step(self, forward: Callable[[], Tensor]) -> Tensor:
        logits = forward()
        limit = _reliable_below(self.max_entropy, logits)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        entropies, p = _entropies(logits), torch.softmax(logits.detach(), dim=1, dtype=dtype)
        kept = entropies < limit
        if self.probabilities is not None:
            mean = self.probabilities.reshape(1, -1, *[1] * (p.dim() - 2))
            kept &= torch.cosine_similarity(mean, p, dim=1).abs() < self.similarity
        count = kept.sum()
        if not count:
            return logits.detach()
        new = p.movedim(1, -1)[kept].mean(dim=0)
        self.probabilities = new if self.probabilities is None else 0.9 * self.probabilities + 0.1 * new
        weight = torch.where(kept, limit - entropies, 0).exp()
        loss = self.loss(logits, mask=kept, sample_weight=weight, normalizer=count)
        if self.fisher is not None:
            terms = zip(self.fisher, self._adapting, self._source(), strict=True)
            loss = loss + self.fisher_weight * sum((f * (p - source) ** 2).sum() for f, p, source in terms)
        self._descend(loss)
        return logits.detach()

    def reset(self) -> None:
        super().reset()
        self.probabilities = None

    def _memory(self) -> dict[str, Any]:
        return {"probabilities": self.probabilities}


class Sar(Adaptation):
    leave_out_last = True

    def __init__(self, *arguments: Any, rho: float, max_entropy: float | None, reset_below: float | None) -> None:
        super().__init__(*arguments)
        self.rho = check.number("rho", rho, least=0.0)
        self.max_entropy = _limit(max_entropy)
        self.reset_below = reset_below if reset_below is None else check.number("reset_below", reset_below, least=-math.inf)
        self.average: float | None = None  # moving, of the kept rows' entropy

    def _step(self, forward: Callable[[], Tensor]) -> Tensor:
        logits = forward()
        limit = _reliable_below(self.max_entropy, logits)
        kept = _entropies(logits) < limit
        if not kept.any():
            return logits.detach()
        self.optimizer.zero_grad()
        self._filtered(logits, kept, limit).backward()
        here = [p.detach().clone() for p in self._adapting]
        self._climb()
        higher = forward()
        entropies = _entropies(higher)
        kept &= entropies < limit
        some = bool(kept.any())
        self.optimizer.zero_grad()
        if some:
            self._filtered(higher, kept, limit).backward()
        with torch.no_grad():
            for p, value in zip(self._adapting, here, strict=True):
                p.copy_(value)
        if some:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._watch(entropies[kept].mean().item())
        return logits.detach()

    def _filtered(self, logits: Tensor, kept: Tensor, limit: float) -> Tensor:
        return self.loss(logits, mask=kept, max_entropy=limit)

    @torch.no_grad()
    def _climb(self) -> None:
        """To the worst place within `rho`, by the gradient."""
        moved = [(p, p.grad) for p in self._adapting if p.grad is not None]
        if moved:
            length = torch.stack([gradient.norm() for _, gradient in moved]).norm()
            for p, gradient in moved:
                p.add_(gradient * (self.rho / (length + 1e-12)))

    def _watch(self, entropy: float) -> None:
        """Back to the source where the predictions have become too sure: the model has collapsed."""
        self.average = entropy if self.average is None else 0.9 * self.average + 0.1 * entropy
        if self.reset_below is not None and self.average < self.reset_below:
            self.reset()

    def reset(self) -> None:
        super().reset()
        self.average = None

    def _memory(self) -> dict[str, Any]:
        return {"average": self.average}


def tent(
    model: nn.Module,
    *,
    loss: str | Callable[..., Tensor] = "entropy",
    optimizer: Optimizer | None = None,
    steps: int = 1,
    episodic: bool = False,
    **loss_arguments: Any,
) -> Adaptation:
    """TENT: a step down the loss of every batch.

    Args:
        model: a trained model; it is changed in place.
        loss: name of a loss without labels ("entropy", "sparse_cl", "knl", "tta", ...: its function without `_loss`), or a
            function of logits with the same `mask`, `sample_weight` and `normalizer`.
        optimizer: from the list of adapting parameters to a torch optimizer; None is SGD, rate 2.5e-4, momentum 0.9.
        steps: updates for each batch.
        episodic: start from the source's weights for every batch.
        loss_arguments: as in the loss function, for example `k=5` or `max_entropy=0.9`.

    **Convention**: of the module `pylosses.adapt`. Not copied from the published code: it takes BatchNorm2d layers alone, here
    every norm layer adapts; it puts the whole model into training mode, which switches dropout on, and throws BatchNorm's
    running statistics away.

    Paper: Wang et al., "Tent: Fully Test-Time Adaptation by Entropy Minimization".

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    >>> adapted = pylosses.adapt.tent(model, loss="tta", k=1, skip=0)
    >>> adapted(torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """
    return Tent(model, loss, optimizer, steps, episodic, loss_arguments)


def eata(
    model: nn.Module,
    *,
    loss: str | Callable[..., Tensor] = "entropy",
    max_entropy: float | None = None,
    similarity: float = 0.05,
    clean: Iterable[Any] | None = None,
    fisher_weight: float = 2000.0,
    optimizer: Optimizer | None = None,
    steps: int = 1,
    episodic: bool = False,
    **loss_arguments: Any,
) -> Adaptation:
    r"""EATA: rows that are reliable and unlike the earlier ones, the surer the heavier, held near the source.

    .. math::
        L = \frac{1}{|S|} \sum_{i \in S} e^{E_0 - H_i} L_i + \beta \sum_k F_k (\theta_k - \theta_k^0)^2, \quad
        S = \{i : H_i < E_0,\ |\cos(m, p_i)| < d\}

    The weights and the set are constants for the gradient; m is the moving average of the kept rows' probabilities, which each
    step with a kept row moves by a tenth.

    Args:
        model, loss, optimizer, steps, episodic, loss_arguments: as in `tent`.
        max_entropy: :math:`E_0` in nats; None is 0.4 log C.
        similarity: :math:`d`.
        clean: batches of inputs like the source's, for the Fisher information F: the squared gradient of the cross-entropy
            with the model's own predictions, averaged over the batches. None leaves that term out, which is ETA.
        fisher_weight: :math:`\beta`.

    **Convention**: of the module `pylosses.adapt`. Not copied from the published code: its constructor's :math:`E_0` of
    log(1000) / 2 - 1, which its command line replaces by 0.4 log 1000; that number for any C.

    Paper: Niu et al., "Efficient Test-Time Model Adaptation without Forgetting".

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    >>> adapted = pylosses.adapt.eata(model, clean=[torch.ones(5, 2)])
    >>> adapted(torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """
    similarity = check.number("similarity", similarity, least=0.0)
    weight = check.number("fisher_weight", fisher_weight, least=0.0)
    fisher = None if clean is None else _fisher(model, clean)
    return Eata(
        model, loss, optimizer, steps, episodic, loss_arguments,
        max_entropy=max_entropy, similarity=similarity, fisher=fisher, weight=weight,
    )  # fmt: skip


def sar(
    model: nn.Module,
    *,
    loss: str | Callable[..., Tensor] = "entropy",
    rho: float = 0.05,
    max_entropy: float | None = None,
    reset_below: float | None = 0.2,
    optimizer: Optimizer | None = None,
    steps: int = 1,
    episodic: bool = False,
    **loss_arguments: Any,
) -> Adaptation:
    """SAR: reliable rows only, the gradient taken where the loss is worst nearby (SAM), and recovery from a collapse.

    Each step forwards the batch, climbs by `rho` along the gradient of the rows with an entropy below `max_entropy`, forwards
    it again, and descends from where it was with the gradient of those rows that are still below.

    Args:
        model, loss, optimizer, steps, episodic, loss_arguments: as in `tent`. The last quarter of the norm layers, as the model
            registers them, does not adapt; all do where there are fewer than four.
        rho: length of the climb, over all adapting parameters together.
        max_entropy: in nats; None is 0.4 log C.
        reset_below: the source's weights come back when the moving average of the second forward's mean entropy falls below it;
            None never.

    **Convention**: of the module `pylosses.adapt`. The average is of the entropy, which is the loss itself for
    ``loss="entropy"`` and has the same meaning for every other. Not copied from the published code: its threshold of recovery
    is 0.2 whatever is asked for; after a recovery the caller overwrites the cleared average with the old low one, so that the
    model recovers again and again; without a reliable row, SGD still moves by its momentum; layers that do not adapt keep
    gathering gradients, and are known by names that fit a ResNet and a ViT of 12 blocks alone; dropout may be on; its limit is
    0.4 log 1000 for any C.

    Paper: Niu et al., "Towards Stable Test-Time Adaptation in Dynamic Wild World".

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    >>> adapted = pylosses.adapt.sar(model, loss="sparse_cl")
    >>> adapted(torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """
    return Sar(
        model, loss, optimizer, steps, episodic, loss_arguments, rho=rho, max_entropy=max_entropy, reset_below=reset_below
    )


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def _unlabelled(loss: str | Callable[..., Tensor], arguments: dict[str, Any]) -> Callable[..., Tensor]:
    """The loss with its arguments; a call may add others, of which those that it does not have are dropped."""
    if callable(loss):
        function = loss
    else:
        check.choice("loss", loss, tuple(spec.name for spec in LOSSES.values() if spec.inputs == "unlabelled"))
        function = getattr(functional, LOSSES[loss].function)
    known = inspect.signature(function).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for name in arguments:
        if name not in known and not anything:
            raise TypeError(f"{name} is no argument of {getattr(function, '__name__', function)}, which has {', '.join(known)}")

    def call(logits: Tensor, **more: Any) -> Tensor:
        return function(logits, **arguments, **{k: v for k, v in more.items() if anything or k in known})

    return call


def _fisher(model: nn.Module, clean: Iterable[Any]) -> list[Tensor]:
    configure(model)
    adapting = parameters(model)
    fisher, batches = [torch.zeros_like(p) for p in adapting], 0
    with torch.inference_mode(False), torch.enable_grad():
        for batch in clean:
            logits = _logits(model(_usable(batch)))
            loss = functional.cross_entropy(logits, logits.detach().argmax(dim=1))
            for f, gradient in zip(fisher, torch.autograd.grad(loss, adapting), strict=True):
                f += gradient**2
            batches += 1
    if not batches:
        raise ValueError("clean must give at least one batch, got none")
    return [f / batches for f in fisher]


@torch.no_grad()
def _entropies(logits: Tensor) -> Tensor:
    """Of each row, shaped like labels; by the kernel whose filter decides, so that both decide alike."""
    return functional.entropy_loss(logits.detach(), reduction="none")


def _reliable_below(limit: float | None, logits: Tensor) -> float:
    return RELIABLE * math.log(logits.shape[1]) if limit is None else limit


def _limit(max_entropy: float | None) -> float | None:
    return max_entropy if max_entropy is None else check.number("max_entropy", max_entropy, least=-math.inf)


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        what = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise TypeError(f"model must return logits (N, C) or (N, C, *), or an object that has them as `logits`, got {what}")
    return logits


def _usable(value: Any) -> Any:
    """Autograd saves no tensor that was made in inference mode; a copy of it is an ordinary one."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
