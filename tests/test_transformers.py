"""Patched language models of transformers: the same loss and gradients without logits, and nothing left behind."""

import copy
import pickle

import pytest
import torch
from resident import allocations
from tolerance import close
from torch import Tensor

import pylosses

transformers = pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from pylosses.integrations.transformers import Logits, patch, unpatch  # noqa: E402

VOCABULARY, WIDTH = 311, 32
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **more}))


def gemma(**more):
    options = {**SMALL, "head_dim": 8, "final_logit_softcapping": 2.0, "attn_implementation": "eager", **more}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**options))


def gpt(**more):
    options = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(embd_pdrop=0.0, attn_pdrop=0.0, **options, **more))


def cohere(**more):
    """Scales its logits."""
    return transformers.CohereForCausalLM(transformers.CohereConfig(**{**SMALL, "logit_scale": 0.0625, **more}))


def phi(**more):
    """Has a bias in its output layer."""
    return transformers.PhiForCausalLM(transformers.PhiConfig(**{**SMALL, "num_key_value_heads": 4, "pad_token_id": 0, **more}))


MODELS = {
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "gemma2": gemma,
    "gpt2": gpt,
    "cohere": cohere,
    "phi": phi,
}


def made(name: str) -> torch.nn.Module:
    """Random weights, larger than those of a fresh model so that logits differ and a cap is felt."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.2)
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            model.get_output_embeddings().bias.normal_()
    return model


def batch(rows: int = 3, length: int = 17) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=g)
    labels = ids.clone()
    labels[0, :5], labels[1, -3:] = -100, -100
    return {"input_ids": ids, "labels": labels}


def step(model: torch.nn.Module, **inputs) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(got: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]], rtol: float = 2e-5) -> None:
    close("loss", got[0], wanted[0], rtol=rtol)
    assert got[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        close(name, got[1][name], grad, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_loss_and_gradients(name):
    model = made(name)
    wanted = step(model, **batch())
    same(step(patch(model), **batch()), wanted)
    assert len(wanted[1]) > 5 and all(g.abs().sum() > 0 for n, g in wanted[1].items() if "weight" in n and "k_proj" not in n)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_in_double_precision(name):
    """To the last digits: it is the same function."""
    model = made(name).double()
    logits = model(batch()["input_ids"]).logits[:, :-1].reshape(-1, VOCABULARY)
    loss = torch.nn.functional.cross_entropy(logits, batch()["labels"][:, 1:].reshape(-1))
    model.zero_grad()
    loss.backward()
    wanted = loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    same(step(patch(model), **batch()), wanted, rtol=1e-11)


@pytest.mark.parametrize("items", [100, torch.tensor(40), torch.tensor([40])])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_number_of_items(name, items):
    """Gradient accumulation: the trainer tells the number of labels of all its batches."""
    model = made(name)
    plain = items.reshape(()) if isinstance(items, Tensor) else items
    wanted = step(model, **batch(), num_items_in_batch=plain)
    same(step(patch(model), **batch(), num_items_in_batch=items), wanted)


def test_shifted_labels():
    """Labels that are shifted already, as context parallelism gives them."""
    model = made("llama")
    shifted = torch.nn.functional.pad(batch()["labels"][:, 1:], (0, 1), value=-100)
    wanted = step(model, **batch(), shift_labels=shifted)
    same(step(patch(model), **batch(), shift_labels=shifted), wanted)


def test_arguments_and_other_losses():
    model = made("llama")
    x, y = model(batch()["input_ids"]).logits[:, :-1].reshape(-1, VOCABULARY), batch()["labels"][:, 1:].reshape(-1)
    for loss, arguments in (
        ("cross_entropy", {"label_smoothing": 0.1, "z_loss": 1e-3}),
        ("hem", {"margin": 0.5}),
        ("focal", {}),
    ):
        wanted = getattr(pylosses, pylosses.LOSSES[loss].function)(x, y, backend="reference", **arguments)
        got = patch(model, loss=loss, workspace=2**16, **arguments)(**batch()).loss
        close(loss, got, wanted, rtol=2e-5)
        unpatch(model)


@pytest.mark.parametrize("name", ["llama", "cohere"])
def test_hem_of_scaled_logits(name):
    model = made(name)
    x, y = model(batch()["input_ids"]).logits[:, :-1].reshape(-1, VOCABULARY), batch()["labels"][:, 1:].reshape(-1)
    close("loss", patch(model, loss="hem")(**batch()).loss, pylosses.hem_loss(x, y), rtol=2e-5)


def test_a_frozen_output_layer():
    model = made("llama")
    model.lm_head.weight.requires_grad_(False)
    wanted = step(model, **batch())
    got = step(patch(model), **batch())
    same(got, wanted)
    assert "lm_head.weight" not in got[1]


@pytest.mark.parametrize("name", MODELS)
def test_logits_when_asked_for(name):
    """Without labels as ever; with labels they are made by whoever uses them, and have a graph."""
    model = made(name)
    ids = batch()["input_ids"]
    wanted = model(ids).logits
    patch(model)
    plain = model(ids).logits
    assert type(plain) is Tensor and torch.equal(plain, wanted)
    output = model(**batch())
    assert type(output.logits) is Logits and output.logits.shape == wanted.shape and output.logits.dtype == wanted.dtype
    assert "_made" not in output.logits.__dict__
    close("logits", output.logits + 0.0, wanted, rtol=1e-6)
    assert torch.equal(output.logits.argmax(dim=-1), wanted.argmax(dim=-1))
    (grad,) = torch.autograd.grad(output.logits.square().sum(), model.get_output_embeddings().weight)
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_evaluation_and_generation(name):
    model = made(name).eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        wanted, words = model(**batch()).loss, model.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
        patch(model)
        close("loss", model(**batch()).loss, wanted, rtol=2e-5)
        assert torch.equal(model.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=0), words)


# Logits that are read late ---------------------------------------------------------------------------------------------------


def _step(model):
    with torch.no_grad():
        torch.optim.SGD(model.parameters(), 1.0).step()


CHANGES = {
    "step": _step,
    "load": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "half": lambda model: model.half(),
    "assign": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight * 2)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["llama", "phi"])
def test_logits_of_a_changed_layer_are_refused(name, change):
    """Old hidden states times new weights are the logits of no model; those that were read before stay what they are."""
    model = patch(made(name))
    early, late, noted = model(**batch()), model(**batch()), model(**batch())
    half = noted.logits / 2
    wanted = early.logits.clone()
    late.loss.backward()
    CHANGES[change](model)
    assert torch.equal(early.logits, wanted) and torch.equal(early.logits.float(), wanted)
    readings = {
        "argmax": lambda: late.logits.argmax(-1),
        "float": lambda: late.logits.float() + 0,
        "noted": lambda: half + 0,
        "loss": lambda: model.loss_function(late.logits, batch()["labels"], VOCABULARY),
    }
    for read in readings.values():
        with pytest.raises(RuntimeError, match=r"not made in the forward.*optimizer\.step.*before it changes"):
            read()


def test_a_changed_bias_counts():
    model = patch(made("phi"))
    output = model(**batch())
    with torch.no_grad():
        model.lm_head.bias.add_(1)
    with pytest.raises(RuntimeError, match="has changed"):
        output.logits.sum()


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("forward", MODES)
@pytest.mark.parametrize("reading", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_are_of_the_mode_of_their_forward(name, forward, reading):
    """A graph where the unpatched model's have one, whoever makes them; a scale has the mode in which it is multiplied."""
    model = made(name)

    def read():
        with forward():
            first, second = (model(**batch()).logits for _ in range(2))
        with reading():
            found = [first.argmax(-1), first.softmax(-1), second / 2, (second / 2).exp()]
        with forward():
            return [*found, first[..., :2], second[..., :2]]

    wanted = read()
    patch(model)
    for got, expected in zip(read(), wanted, strict=True):
        got = got.made() if type(got) is Logits else got
        assert got.requires_grad == expected.requires_grad and got.is_inference() == expected.is_inference()
        close("read", got.detach().double(), expected.detach().double(), rtol=1e-5)


def test_logits_of_an_evaluation_can_be_used_in_training():
    """Collected without a graph, they are data to whoever learns from them."""
    model, scale = patch(made("llama")), torch.nn.Parameter(torch.ones(()))
    with torch.no_grad():
        logits = model(**batch()).logits
    (logits * scale).sum().backward()
    assert scale.grad is not None and all(p.grad is None for p in model.parameters())


def test_logits_are_of_the_autocast_of_their_forward():
    model = made("llama")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(**batch()).logits
        got = patch(model)(**batch()).logits
    assert torch.equal(got + 0, wanted + 0) and (got + 0).dtype == torch.bfloat16


def test_tuples():
    model = patch(made("llama"))
    loss, logits = model(**batch(), return_dict=False)[:2]
    close("loss", loss, model(**batch()).loss, rtol=1e-6)
    assert logits.shape == (3, 17, VOCABULARY)


def test_labels_by_position():
    model = patch(made("llama"))
    inputs = batch()
    output = model(inputs["input_ids"], None, None, None, None, inputs["labels"])
    close("loss", output.loss, model(**inputs).loss, rtol=1e-6)
    assert "_made" not in output.logits.__dict__


# Undone -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_an_undone_patch_leaves_nothing(name):
    model = made(name)
    head = model.get_output_embeddings()
    before = step(model, **batch())
    attributes = {m: (type(m), set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()}
    step(patch(model), **batch())
    assert unpatch(model) is model
    after = step(model, **batch())
    assert torch.equal(before[0], after[0]) and all(torch.equal(g, after[1][n]) for n, g in before[1].items())
    assert {m: (type(m), set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()} == attributes
    assert model.get_output_embeddings() is head and type(head) is torch.nn.Linear


def test_a_loss_function_of_the_users_comes_back():
    model = made("llama")

    def mine(logits, labels, vocab_size, **more):
        return logits.sum()

    model.loss_function = mine
    unpatch(patch(model))
    assert model.loss_function is mine


def test_state_dict_is_the_models():
    model = made("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    after = patch(model).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how):
    """A copy has its own weights, trains by itself and can be undone by itself."""
    model = patch(made("llama"))
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
    assert float(other(**batch()).loss.detach()) != float(model(**batch()).loss.detach())
    unpatch(other)
    assert type(other.lm_head) is torch.nn.Linear and type(other(**batch()).logits) is Tensor
    assert type(model(**batch()).logits) is Logits, "the original is still patched"
    same(step(patch(other), **batch()), step(unpatch(other), **batch()))


def test_an_error_inside_leaves_the_model_usable():
    model = patch(made("llama"))
    with pytest.raises(IndexError, match=r"outside \[0, 311\)"):
        model(input_ids=batch()["input_ids"], labels=batch()["labels"].clamp(min=0) + VOCABULARY)
    assert type(model(batch()["input_ids"]).logits) is Tensor


def test_refused():
    model = made("llama")
    with pytest.raises(ValueError, match="is not patched"):
        unpatch(model)
    with pytest.raises(ValueError, match="loss must be one of"):
        patch(model, loss="dice")
    with pytest.raises(ValueError, match="shift is set by the patch"):
        patch(model, shift=True)
    with pytest.raises(ValueError, match="caps its logits at 2"):
        patch(made("gemma2"), loss="hem")
    with pytest.raises(TypeError, match="must be a causal language model"):
        patch(torch.nn.Linear(3, 3))
    patch(model)
    with pytest.raises(ValueError, match="is patched already"):
        patch(model)
    model = made("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match="must be a plain nn.Linear, got Sequential"):
        patch(model)


def small_bert(kind, **more):
    options = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
    config = {"ModernBertForMaskedLM": "ModernBertConfig", "T5ForConditionalGeneration": "T5Config"}.get(kind, "BertConfig")
    return getattr(transformers, kind)(getattr(transformers, config)(**options, num_hidden_layers=1, **more))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ModernBertForMaskedLM", "ModernBertForMaskedLM computes ForMaskedLMLoss"),
        ("BertForMaskedLM", "BertForMaskedLM computes ForMaskedLMLoss"),
        ("T5ForConditionalGeneration", "T5ForConditionalGeneration computes its loss in its own way"),
        ("BertForTokenClassification", "must be a causal language model"),
    ],
)
def test_other_objectives_are_refused(kind, reason):
    """With the labels one earlier, or a loss that is never asked for; nothing of the model is changed."""
    more = {"pad_token_id": 0} | ({"reference_compile": False} if kind.startswith("Modern") else {})
    model = small_bert(kind, **more)
    before = dict(vars(model))
    with pytest.raises(TypeError, match=reason):
        patch(model)
    assert vars(model) == before
    if model.get_output_embeddings() is not None:
        assert type(model.get_output_embeddings()) is torch.nn.Linear


def test_a_model_that_says_masked_is_refused_also_with_a_causal_name():
    model = made("llama")
    model.loss_type = "ForMaskedLM"
    with pytest.raises(TypeError, match="LlamaForCausalLM computes ForMaskedLMLoss"):
        patch(model)


def test_subclasses_of_a_causal_model_are_taken():
    class Mine(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = Mine(transformers.LlamaConfig(**SMALL))
    wanted = model(**batch()).loss
    close("loss", patch(model)(**batch()).loss, wanted, rtol=2e-5)


def test_logits_that_were_made_before_the_loss():
    """A model that does something else to its logits: the loss is right, and a warning says what it costs."""
    model = made("llama")
    patch(model)
    loss, inputs = model.loss_function, batch()
    with pytest.warns(UserWarning, match="they are stored"):
        got = loss(model(inputs["input_ids"]).logits.clamp(max=1e9), inputs["labels"], VOCABULARY)
    close("loss", got, model(**inputs).loss, rtol=1e-6)


# Half precision, and memory ---------------------------------------------------------------------------------------------------


def test_half_precision():
    """A model in bfloat16: float32 loss, gradients in bfloat16, nearer to the truth than its own rounded logits."""
    model = made("llama").bfloat16()
    truth = step(copy.deepcopy(model).double(), **batch())[0]
    plain, mine = step(model, **batch()), step(patch(model), **batch())
    assert mine[0].dtype == torch.float32 and all(g.dtype == torch.bfloat16 for g in mine[1].values())
    close("loss", mine[0], plain[0], rtol=2e-2)
    assert (mine[0].double() - truth).abs() < 0.05 * truth.abs()


def test_autocast():
    model = made("llama")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(**batch())
        got = patch(model)(**batch())
        assert got.logits.dtype == wanted.logits.dtype == torch.bfloat16
    close("loss", got.loss, wanted.loss, rtol=2e-2)


@pytest.mark.skipif(not pylosses.backends()["cpu"].available, reason=f"cpu: {pylosses.backends()['cpu'].reason}")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_no_logits_in_memory(name):
    """torch's allocator, with 20000 words and 512 positions: the patched step never holds an eighth of the logits at once."""
    more = {"vocab_size": 20000}
    makers = {"llama": lambda: llama(**more), "gemma2": lambda: gemma(**more)}
    config = transformers.GPT2Config(vocab_size=20000, n_embd=WIDTH, n_layer=1, n_head=4, n_positions=128)
    model = makers[name]() if name in makers else transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 20000, (8, 64))
    logits = ids.numel() * 20000 * 4

    def train():
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    train()
    sizes, _ = allocations(train)
    assert max(sizes) >= logits, "the measure sees the unpatched model's logits"
    patch(model, workspace=2**20)
    sizes, _ = allocations(train)
    assert max(sizes) < logits / 8, f"{max(sizes)} bytes at once, the logits have {logits}"
    unpatch(model)
