"""Hugging Face causal language models that compute their loss from the hidden states, without logits.

    pylosses.integrations.transformers.patch(model, loss="cross_entropy", **arguments)      unpatch(model)

A patched model runs its own forward. When that is given labels, its output layer answers with `Logits`, which know how to
become logits but have not: what the model does with them (Gemma's softcap, a scale) is noted down, and the model's loss
function, which is exchanged for one of pylosses, takes the hidden states and the layer's weight out of them. Anything else that
looks at them (a metric, a model that computes its loss in its own way) makes them, and gets what it would have got.

Without labels, in generation for one, nothing is different from the model as it was.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..linear import _row_loss, linear_loss

_STATE = "_pylosses_patch"


def patch(model: Any, loss: str = "cross_entropy", **arguments: Any) -> Any:
    """Let a causal language model of transformers compute its loss with pylosses, without storing its logits.

    Args:
        model: a model with an output layer (`model.get_output_embeddings()`) that is a plain `nn.Linear`, and whose forward
            calls the loss of a causal language model (`model.loss_function`): most `*ForCausalLM` classes. It is changed in
            place. Others are refused: a masked language model predicts another label, and one that computes its loss in its
            own way would make its logits as before.
        loss: name of a loss with labels in `pylosses.LOSSES`, of family "softmax" or "margin".
        arguments: keyword arguments of `pylosses.linear_loss` and of that loss, for every call: `label_smoothing`, `z_loss`,
            `margin`, `weight`, `workspace`, ... What comes with a call (`target`, `shift`, `normalizer`) is set by the patch.

    Returns:
        the model.

    **Convention**

    - ``model(input_ids, labels=labels)`` gives the loss of the unpatched model for "cross_entropy" without arguments: position
      t predicts label t + 1, or what `shift_labels` says; labels of -100 are ignored; `num_items_in_batch` is the divisor.
      Logits are float32 inside, where a model in half precision rounds them; nothing to predict gives 0, where it gives NaN.
    - the output's `logits` are made when they are first used, as the forward would have made them: with a graph to the model
      unless it ran under no_grad or inference_mode, and under its autocast. Read them to pay for them, and read them before
      ``optimizer.step()``: from an output layer that has changed they raise RuntimeError.
    - a final softcap (Gemma 2) is part of the cross-entropy; other losses refuse such a model. A scale of the logits counts.
    - tied weights get both gradients; a frozen output layer none. The weights must be whole where the loss is computed: a layer
      that FSDP or ZeRO-3 has split again by then is not supported. Under torch.compile the logits are stored.
    - `copy.deepcopy` and pickling of a patched model work, and so does `unpatch` of the copy.

    >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
    >>> model = patch(LlamaForCausalLM(LlamaConfig()), loss="hem", margin=0.5)  # doctest: +SKIP
    """
    if hasattr(model, _STATE):
        raise ValueError(f"{type(model).__name__} is patched already; unpatch it first")
    head = _output_layer(model)
    _refuse_other_losses(model)
    _row_loss(loss)  # an unknown name is an error here and not in the first step
    for name in ("target", "shift", "normalizer", "linear_bias", "input", "linear_weight"):
        if name in arguments:
            raise ValueError(f"{name} is set by the patch in each call, it cannot be an argument")
    softcap = _softcap(model)
    if softcap is not None and loss != "cross_entropy":
        raise ValueError(
            f"{type(model).__name__} caps its logits at {softcap:g}, which only the loss 'cross_entropy' does, got {loss!r}; "
            "set final_logit_softcapping of its configuration to None to train without"
        )
    before = model.__dict__.get("_loss_function", _ABSENT)
    model.loss_function = _Loss(loss, arguments)
    head.__class__ = _Head
    hooks = [
        model.register_forward_pre_hook(_begin, with_kwargs=True),
        model.register_forward_hook(_end, always_call=True),
    ]
    setattr(model, _STATE, (before, hooks))
    return model


def unpatch(model: Any) -> Any:
    """Undo `patch`; the model is what it was before."""
    if not hasattr(model, _STATE):
        raise ValueError(f"{type(model).__name__} is not patched")
    before, hooks = getattr(model, _STATE)
    for hook in hooks:
        hook.remove()
    if before is _ABSENT:
        del model._loss_function
    else:
        model.loss_function = before
    _output_layer(model).__class__ = nn.Linear
    delattr(model, _STATE)
    return model


class _Absent:
    """There was no loss function of the model's own; one object, also in copies."""

    def __reduce__(self) -> str:
        return "_ABSENT"


_ABSENT = _Absent()


def _output_layer(model: Any) -> nn.Linear:
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    name = type(model).__name__
    if layer is None or not hasattr(type(model), "loss_function"):
        raise TypeError(
            f"model must be a causal language model of transformers with an output layer and a loss_function, got {name}"
        )
    if type(layer) not in (nn.Linear, _Head):
        raise TypeError(f"the output layer of {name} must be a plain nn.Linear, got {type(layer).__name__}")
    return layer


def _refuse_other_losses(model: Any) -> None:
    """Whether the model computes another loss, or this one without asking: a loss function of the user's does not count."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    kind, name = type(model), type(model).__name__
    own = LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss)
    if own is not ForCausalLMLoss:
        raise TypeError(f"model must compute transformers' loss of a causal language model, {name} computes {own.__name__}")
    forwards = [inspect.unwrap(each.__dict__["forward"]) for each in kind.__mro__ if "forward" in each.__dict__]
    if not any("loss_function" in forward.__code__.co_names for forward in forwards):
        raise TypeError(
            f"model must call its loss_function, {name} computes its loss in its own way, from logits: nothing would be saved"
        )


def _softcap(model: Any) -> float | None:
    config = getattr(model, "config", None)
    return getattr(config, "final_logit_softcapping", None)


# One call of the model --------------------------------------------------------------------------------------------------------

_calls = threading.local()  # .stack: for each model whose forward runs in this thread, whether it has labels


def _stack() -> list[bool]:
    if not hasattr(_calls, "stack"):
        _calls.stack = []
    return _calls.stack


def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    labels = kwargs.get("labels")
    if labels is None and args:
        names = list(inspect.signature(model.forward).parameters)
        labels = dict(zip(names, args, strict=False)).get("labels")
    _stack().append(labels is not None)


def _end(model: nn.Module, args: Any, output: Any) -> None:
    _stack().pop()


class _Head(nn.Linear):
    """An output layer that does not make logits where a loss will take them. It has no state beside nn.Linear's."""

    def forward(self, input: Tensor) -> Tensor:
        tracing = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if tracing or not _stack() or not _stack()[-1]:
            return super().forward(input)
        now = _Moment.of(input, self)
        return Logits.of(input, self, now, input.dtype if now.autocast is None else now.autocast)


class _Moment(NamedTuple):
    """What logits depend on beside hidden states, as it was in the forward."""

    weights: list[tuple[Tensor, int, torch.UntypedStorage]]  #: of the layer, with their versions and memory
    grad: bool
    inference: bool
    autocast: torch.dtype | None

    @staticmethod
    def of(hidden: Tensor, layer: nn.Linear) -> _Moment:
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return _Moment(_weights(layer), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def refuse_another_layer(self, layer: nn.Linear) -> None:
        """The layer must be what it was: logits of old hidden states and new weights are those of no model."""
        for (then, version, memory), (now, new_version, new_memory) in zip(self.weights, _weights(layer), strict=True):
            if then is not now or version != new_version or memory._cdata != new_memory._cdata:
                raise RuntimeError(
                    "these logits were not made in the forward, and the output layer has changed since then (optimizer.step(), "
                    "load_state_dict, a conversion). Read them before it changes, for example "
                    "predictions = output.logits.argmax(-1)"
                )

    @contextmanager
    def again(self, device: torch.device) -> Iterator[None]:
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None),
        ):
            yield

    def is_now(self) -> bool:
        return (self.grad, self.inference) == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())


def _weights(layer: nn.Linear) -> list[tuple[Tensor, int, torch.UntypedStorage]]:
    found = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    return [(t, 0 if t.is_inference() else t._version, t.untyped_storage()) for t in found]


class Logits(Tensor):
    """The logits layer(hidden) / before, or after * tanh(layer(hidden) / before), until somebody uses them."""

    hidden: Tensor
    layer: nn.Linear
    moment: _Moment
    before: float
    after: float | None  # None: there is no tanh

    @staticmethod
    def of(
        hidden: Tensor,
        layer: nn.Linear,
        moment: _Moment,
        dtype: torch.dtype,
        before: float = 1.0,
        after: float | None = None,
    ) -> Logits:
        x = torch.empty((), dtype=dtype, device=hidden.device).expand(*hidden.shape[:-1], layer.out_features)
        x = x.as_subclass(Logits)
        x.hidden, x.layer, x.moment, x.before, x.after = hidden, layer, moment, before, after
        return x

    def made(self) -> Tensor:
        """The logits, part of the model's graph."""
        if "_made" not in self.__dict__:
            self.moment.refuse_another_layer(self.layer)
            with self.moment.again(self.hidden.device):
                x = nn.Linear.forward(self.layer, self.hidden)
                x = x if self.before == 1 else x / self.before
                x = x if self.after is None else torch.tanh(x) * self.after
                self._made = x.to(self.dtype)
        return self._made

    def noted(self, name: str, other: Any) -> Logits | None:
        """What an operation makes of them, if it can be noted down."""
        if "_made" in self.__dict__ or not self.moment.is_now():
            return None
        dtype, before, after = self.dtype, self.before, self.after
        number = isinstance(other, (int, float)) and other != 0
        if name == "float":
            dtype = torch.float32
        elif name == "tanh" and after is None:
            after = 1.0
        elif name in _DIVISIONS and number:
            before, after = (before * other, None) if after is None else (before, after / other)
        elif name in _PRODUCTS and number:
            before, after = (before / other, None) if after is None else (before, after * other)
        else:
            return None
        return Logits.of(self.hidden, self.layer, self.moment, dtype, before, after)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if attribute in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if isinstance(args[0], Logits) and not kwargs and len(args) <= 2:
            noted = args[0].noted(name, args[1] if len(args) == 2 else None)
            if noted is not None:
                return noted
        return func(*_made(args), **_made(kwargs or {}))


#: what is known of logits before they are made
_METADATA = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_sparse", "is_quantized", "is_meta",
    "is_cuda", "is_cpu", "dim", "size", "numel", "is_floating_point", "is_complex", "__len__", "element_size",
}  # fmt: skip
_DIVISIONS = {"div", "true_divide", "divide", "__truediv__"}
_PRODUCTS = {"mul", "multiply", "__mul__", "__rmul__"}


def _made(value: Any) -> Any:
    """`value` with logits in the place of `Logits`."""
    if isinstance(value, Logits):
        return value.made()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_made, value))
    if type(value) is dict:
        return {k: _made(v) for k, v in value.items()}
    return value


class _Loss:
    """In the place of the model's loss function, with its signature."""

    def __init__(self, loss: str, arguments: dict[str, Any]) -> None:
        self.loss, self.arguments = loss, arguments

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        arguments = {"ignore_index": ignore_index, **self.arguments}
        if num_items_in_batch is not None:
            count = torch.as_tensor(num_items_in_batch, device=logits.device)
            arguments["normalizer"] = count.reshape(()) if count.numel() == 1 else count
        target = (labels if shift_labels is None else shift_labels).to(logits.device)
        shift = shift_labels is None
        if not isinstance(logits, Logits):
            return self._stored(logits, target, shift, arguments)
        layer, hidden = logits.layer, logits.hidden
        logits.moment.refuse_another_layer(layer)
        bias: Tensor | None = layer.bias
        if logits.after is not None:
            arguments = {"softcap": logits.before, "temperature": logits.before / logits.after, **arguments}
            if self.loss != "cross_entropy":
                raise ValueError(f"the model caps its logits, which only 'cross_entropy' can, not {self.loss!r}")
        elif logits.before != 1:
            hidden, bias = hidden / logits.before, bias if bias is None else bias / logits.before
        return linear_loss(hidden, layer.weight, target, loss=self.loss, linear_bias=bias, shift=shift, **arguments)

    def _stored(self, logits: Tensor, target: Tensor, shift: bool, arguments: dict[str, Any]) -> Tensor:
        """Of logits that exist: torch.compile, or a model that did something else with them."""
        if not torch.compiler.is_compiling():
            warnings.warn("the model made its logits before the loss, so they are stored", stacklevel=3)
        if shift:
            target = nn.functional.pad(target[..., 1:], (0, 1), value=arguments["ignore_index"])
        arguments.pop("workspace", None)
        return _row_loss(self.loss)(logits.reshape(-1, logits.shape[-1]).float(), target.reshape(-1), **arguments)
