"""Test-time adaptation: equal to plain loops, parameter by parameter; what is filtered out changes nothing."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

import pylosses
from pylosses import adapt

C = 5
LIMIT = 0.4 * math.log(C)


def network(norm: str = "batch", dtype: torch.dtype = torch.float64, layers: int = 5) -> nn.Sequential:
    """Convolutions with `layers` norm layers and, for the loops to leave alone, dropout."""
    torch.manual_seed(1)
    made: list[nn.Module] = []
    for i in range(layers):
        made.append(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1))
        made.append(nn.BatchNorm2d(8) if norm == "batch" else nn.GroupNorm(2, 8))
        made.append(nn.ReLU())
    made += [nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, C)]
    model = nn.Sequential(*made).to(dtype)
    with torch.no_grad():
        made[-1].weight *= 60  # predictions of every certainty
    return model


def stream(batches: int = 4, size: int = 12, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    scale = 3 * torch.rand(batches, size, 1, 1, 1, generator=g)
    return list((scale * torch.randn(batches, size, 3, 6, 6, generator=g)).to(dtype))


def affine(model: nn.Module, last: int = 0) -> list[nn.Parameter]:
    """Weights and biases of the norm layers but the last few."""
    layers = [m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, nn.GroupNorm))]
    return [p for layer in layers[: len(layers) - last] for p in (layer.weight, layer.bias)]


def plain(model: nn.Module, adapting: list[nn.Parameter]) -> nn.Module:
    """The published set-up, done by hand: batch statistics, everything frozen but the norm layers."""
    model.eval()
    for p in model.parameters():
        p.requires_grad = False
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.track_running_stats, m.running_mean, m.running_var = False, None, None
    for p in adapting:
        p.requires_grad = True
    return model


def made(name: str, model: nn.Module, **more) -> adapt.Adaptation:
    """The loop of that name, which does not recover: these models are surer than that allows."""
    return getattr(adapt, name)(model, optimizer=sgd, **({"reset_below": None} if name == "sar" else {}), **more)


def entropy(x: Tensor) -> Tensor:
    return -(x.softmax(1) * x.log_softmax(1)).sum(1)


def sgd(parameters: list[nn.Parameter], rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def equal(adapted: nn.Module, expected: nn.Module) -> None:
    """Every parameter of the adapted model, and that some have moved."""
    got, wanted = dict(adapted.model.named_parameters()), dict(expected.named_parameters())
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain_tent(model: nn.Module, batches: list[Tensor], loss=lambda x: entropy(x).mean(), steps: int = 1) -> list[Tensor]:
    plain(model, affine(model))
    optimizer, outputs = sgd(affine(model)), []
    for x in batches:
        for _ in range(steps):
            logits = model(x)
            loss(logits).backward()
            optimizer.step()
            optimizer.zero_grad()
        outputs.append(logits.detach())
    return outputs


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("steps", [1, 2])
def test_tent_is_the_plain_loop(norm, steps):
    model, expected = network(norm), network(norm)
    adapted = adapt.tent(model, optimizer=sgd, steps=steps)
    outputs = [adapted(x) for x in stream()]
    for a, e in zip(outputs, plain_tent(expected, stream(), steps=steps), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11)
    equal(adapted, expected)
    assert not same(values(model), values(network(norm)))


def test_another_loss_with_its_arguments():
    """sparse-CL plus hard negatives, written out."""

    def written_out(x: Tensor) -> Tensor:
        order = x.argsort(dim=1, descending=True)
        negatives = x.softmax(1).gather(1, order[:, 2:4])
        return (-x.amax(1) - 0.5 * torch.log1p(-negatives).sum(1)).mean()

    expected = network()
    adapted = adapt.tent(network(), loss="tta", k=2, skip=1, lam=0.5, optimizer=sgd)
    for x in stream():
        adapted(x)
    plain_tent(expected, stream(), written_out)
    equal(adapted, expected)


def test_a_loss_of_the_callers():
    expected = network()
    adapted = adapt.tent(network(), loss=lambda x, scale: scale * entropy(x).mean(), scale=3.0, optimizer=sgd)
    for x in stream():
        adapted(x)
    plain_tent(expected, stream(), lambda x: 3 * entropy(x).mean())
    equal(adapted, expected)


@pytest.mark.parametrize("with_fisher", [False, True])
def test_eata_is_the_plain_loop(with_fisher):
    beta, d = 200.0, 0.6
    clean = stream(2, 8)
    adapted = adapt.eata(network(), optimizer=sgd, similarity=d, clean=clean if with_fisher else None, fisher_weight=beta)
    for x in stream():
        adapted(x)

    expected = network()
    adapting = affine(expected)
    plain(expected, adapting)
    source, fisher = [p.detach().clone() for p in adapting], [torch.zeros_like(p) for p in adapting]
    for x in clean if with_fisher else []:
        logits = expected(x)
        nn.functional.cross_entropy(logits, logits.argmax(1)).backward()
        for f, p in zip(fisher, adapting, strict=True):
            f += p.grad**2 / len(clean)
            p.grad = None
    optimizer, mean, kept_rows, similar_rows = sgd(adapting), None, 0, 0
    for x in stream():
        logits = expected(x)
        h, p = entropy(logits), logits.softmax(1).detach()
        kept = h.detach() < LIMIT
        if mean is not None:
            unlike = nn.functional.cosine_similarity(mean[None], p, dim=1).abs() < d
            similar_rows += int((kept & ~unlike).sum())
            kept = kept & unlike
        if not kept.any():
            continue
        kept_rows += int(kept.sum())
        mean = p[kept].mean(0) if mean is None else 0.9 * mean + 0.1 * p[kept].mean(0)
        loss = (h[kept] * torch.exp(LIMIT - h[kept].detach())).mean()
        loss = loss + beta * sum((f * (q - s) ** 2).sum() for f, q, s in zip(fisher, adapting, source, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert kept_rows > 4 and similar_rows > 2  # both filters act
    equal(adapted, expected)
    torch.testing.assert_close(adapted.probabilities.double(), mean, rtol=1e-5, atol=1e-6)


def plain_sar(
    model: nn.Module, batches: list[Tensor], reset_below: float, rho: float = 0.05, last: int = 1
) -> tuple[int, float | None]:
    """SAR without its quirks; the number of recoveries and the last average."""
    adapting = affine(model, last)
    plain(model, adapting)
    source, average, recoveries = values(model), None, 0
    optimizer = sgd(adapting)
    for x in batches:
        h = entropy(model(x))
        kept = (h < LIMIT).nonzero()[:, 0]
        if not len(kept):
            continue
        gradient = torch.autograd.grad(h[kept].mean(), adapting)
        length = torch.cat([g.flatten() for g in gradient]).norm()
        here = [p.detach().clone() for p in adapting]
        with torch.no_grad():
            for p, g in zip(adapting, gradient, strict=True):
                p += rho * g / (length + 1e-12)
        h = entropy(model(x))[kept]
        still = h[h < LIMIT]
        gradient = torch.autograd.grad(still.mean(), adapting) if len(still) else None
        with torch.no_grad():
            for p, value in zip(adapting, here, strict=True):
                p.copy_(value)
        if gradient is None:
            continue
        for p, g in zip(adapting, gradient, strict=True):
            p.grad = g
        optimizer.step()
        average = still.mean().item() if average is None else 0.9 * average + 0.1 * still.mean().item()
        if average < reset_below:
            recoveries, average = recoveries + 1, None
            with torch.no_grad():
                for p, value in zip(model.parameters(), source, strict=True):
                    p.copy_(value)
            optimizer = sgd(adapting)
    return recoveries, average


@pytest.mark.parametrize("norm, reset_below", [("batch", 0.0), ("group", 0.0), ("batch", 0.21)])
def test_sar_is_the_plain_loop(norm, reset_below):
    expected = network(norm)
    adapted = adapt.sar(network(norm), optimizer=sgd, reset_below=reset_below)
    for x in stream(8):
        adapted(x)
    recoveries, average = plain_sar(expected, stream(8), reset_below)
    assert recoveries < 8 and (recoveries > 0) == (reset_below > 0)
    assert adapted.average == pytest.approx(average, rel=1e-9)
    equal(adapted, expected)


def test_sars_filter_holds_for_a_loss_that_has_none():
    """The caller's loss takes a mask; rows out of it do not count."""
    seen = []

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        seen.append(mask)
        return entropy(x)[mask].mean()

    expected = network()
    adapted = adapt.sar(network(), loss=loss, optimizer=sgd, reset_below=None)
    for x in stream():
        adapted(x)
    plain_sar(expected, stream(), -1.0)
    equal(adapted, expected)
    assert any(not mask.all() for mask in seen)


class Fading(nn.Module):
    """A network that knows nothing in the forwards whose numbers are in `blank`."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.calls, self.blank = network(), 0, ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.network(x) * (self.calls not in self.blank)


@pytest.mark.parametrize("name, blank", [("tent", 2), ("eata", 2), ("sar", 3), ("sar", 4)], ids=str)
def test_a_filter_that_keeps_nothing_changes_nothing(name, blank):
    """Not even by momentum, which a first batch has gathered. SAR: in the first forward of the second batch, or its second."""
    adapted = made(name, Fading(), max_entropy=LIMIT)
    adapted.model.blank = (blank,)
    first, second = stream(2, 40)
    adapted(first)
    assert adapted.optimizer.state_dict()["state"]  # there is a momentum to move by
    before = copy.deepcopy(adapted.state_dict())
    adapted(second)
    assert adapted.model.calls >= blank
    after = adapted.state_dict()
    assert str(after.pop("_extra_state")) == str(before.pop("_extra_state"))
    assert same(list(after.values()), list(before.values()))


def test_the_same_batch_moves_a_model_that_knows_something():
    """What the test above asserts to stay does move without the blank forward."""
    adapted = made("sar", Fading(), max_entropy=LIMIT)
    for x in stream(2, 40):
        before = values(adapted.model)
        adapted(x)
        assert not same(values(adapted.model), before)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", ["tent", "eata", "sar"])
def test_batch_of_one(name, norm):
    adapted = made(name, network(norm), max_entropy=10.0)
    assert adapted(stream(1, 1)[0]).shape == (1, C)
    assert not same(values(adapted.model), values(network(norm)))


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, C, 1)).double()
        with torch.no_grad():
            self.body[-1].weight *= 8

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_a_segmenters_rows_are_its_pixels():
    expected = Segmenter()
    adapted = adapt.sar(Segmenter(), optimizer=sgd, reset_below=None)
    for x in stream():
        assert adapted(x).shape == (12, C, 6, 6)
    adapting = affine(expected)

    class ByPixel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = expected

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).movedim(1, -1).reshape(-1, C)

    plain_sar(ByPixel(), stream(), -1.0, last=0)
    equal(adapted, expected)
    assert len(adapting) == 2 and not same(values(expected), values(Segmenter()))
    for name in ("tent", "eata"):
        adapted = made(name, Segmenter())
        for x in stream():
            adapted(x)
        assert not same(values(adapted.model), values(Segmenter()))


def test_eata_by_pixel_is_eata_by_row():
    """A segmenter's pixels, and the same logits as rows."""

    class Flat(Segmenter):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).movedim(1, -1).reshape(-1, C)

    pixels, rows = (adapt.eata(model, optimizer=sgd, similarity=0.6) for model in (Segmenter(), Flat()))
    for x in stream():
        pixels(x), rows(x)
    equal(pixels, rows.model)


@pytest.mark.parametrize("name", ["tent", "eata", "sar"])
def test_reset_and_episodes(name):
    """`reset` brings weights, optimizer and memory back; an episode starts there each time."""
    make = lambda **more: made(name, network(), max_entropy=LIMIT, **more)
    adapted, episodic = make(), make(episodic=True)
    first, second = stream(2, 40)
    fresh = str(adapted.state_dict()["_extra_state"])
    adapted(first)
    assert str(adapted.state_dict()["_extra_state"]) != fresh
    adapted.reset()
    assert same(values(adapted.model), values(network())) and str(adapted.state_dict()["_extra_state"]) == fresh
    adapted(second)
    episodic(first), episodic(second)
    equal(adapted, episodic.model)


@pytest.mark.parametrize("name", ["tent", "eata", "sar"])
def test_state_goes_on_where_it_was_saved(name):
    make = lambda: made(name, network(), max_entropy=LIMIT)
    whole, first = make(), make()
    batches = stream(6, 40)
    for x in batches:
        whole(x)
    for x in batches[:3]:
        first(x)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make()
    second.load_state_dict(torch.load(file))
    for x in batches[3:]:
        second(x)
    equal(second, whole.model)
    second.reset()
    assert same(values(second.model), values(network()))


@pytest.mark.parametrize("name", ["tent", "eata", "sar"])
def test_contexts_of_the_caller(name):
    """no_grad, inference mode (with tensors of its own), and a compiled model give the same adaptation."""
    make = lambda model: made(name, model, max_entropy=LIMIT)
    expected = make(network())
    for x in stream(3, 40):
        expected(x)
    for model, context in [
        (network(), torch.no_grad),
        (network(), torch.inference_mode),
        (torch.compile(network(), backend="eager"), torch.no_grad),
    ]:
        adapted = make(model)
        for x in stream(3, 40):
            with context():
                logits = adapted(x.clone())
            assert not logits.requires_grad
        for a, e in zip(values(adapted.model), values(expected.model), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["tent", "eata", "sar"])
def test_a_backend_that_is_asked_for(name):
    """Every kernel that a loop needs exists on each backend."""
    expected = made(name, network(), max_entropy=LIMIT)
    for x in stream(3, 40):
        expected(x)
    for backend in ("reference", "cpu", "triton"):
        if not pylosses.backends()[backend].available:
            continue
        adapted = made(name, network(), max_entropy=LIMIT)
        with pylosses.use_backend(backend):
            for x in stream(3, 40):
                adapted(x)
        equal(adapted, expected.model)


@pytest.mark.parametrize("name", ["tent", "eata", "sar"])
def test_autocast(name):
    """bfloat16 layers: near the adaptation in float32, of float32 weights."""
    exact, cast = (made(name, network(dtype=torch.float32), max_entropy=1.0) for _ in range(2))
    for x in stream(3, 40, torch.float32):
        exact(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert cast(x).dtype == torch.bfloat16
    start = torch.cat([p.flatten() for p in affine(network(dtype=torch.float32))])
    moved = torch.cat([p.flatten() for p in affine(exact.model)]) - start
    off = torch.cat([p.flatten() for p in affine(cast.model)]) - start - moved
    assert off.norm() < 0.3 * moved.norm()


def test_configuration():
    """Norm layers alone learn, with batch statistics and without dropout, whatever mode the wrapper is put into."""
    model = network()
    statistics = copy.deepcopy(dict(model.named_buffers()))
    adapted = adapt.tent(model, optimizer=sgd)
    learning = {id(p) for p in model.parameters() if p.requires_grad}
    assert learning == {id(p) for p in affine(model)} == {id(p) for p in adapt.parameters(model)}
    x = stream(1)[0]
    for mode in (True, False):
        adapted.train(mode)
        assert not model[-4].training  # dropout
        assert torch.equal(model(x), model(x))
        assert not torch.equal(model(x)[:4], model(x[:4]))  # of the batch
    adapted(x)
    for name, value in model.named_buffers():
        assert torch.equal(value, statistics[name]), name
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("layers, left_out", [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_sar_leaves_the_last_quarter_out(layers, left_out):
    model = network(layers=layers)
    adapt.sar(model)
    learning = [p for p in model.parameters() if p.requires_grad]
    assert len(learning) == 2 * (layers - left_out)
    assert [id(p) for p in learning] == [id(p) for p in affine(model, left_out)]


def test_an_output_with_logits():
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, pixels: Tensor, scale: float) -> Output:
            return Output(self.inner(pixels) * scale)

    expected = network()
    adapted = adapt.tent(Wrapped(), optimizer=sgd)
    for x in stream():
        adapted(pixels=x, scale=1.0)
    plain_tent(expected, stream())
    for a, e in zip(values(adapted.model.inner), values(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "error, message, call",
    [
        (ValueError, "loss must be one of.*'entropy'.*got 'hem'", lambda: adapt.tent(network(), loss="hem")),
        (TypeError, "skip is no argument of entropy_loss", lambda: adapt.tent(network(), skip=3)),
        (ValueError, "norm layer", lambda: adapt.tent(nn.Linear(2, 2))),
        (TypeError, "model must be an nn.Module, got function", lambda: adapt.sar(lambda x: x)),
        (ValueError, "rho", lambda: adapt.sar(network(), rho=-1.0)),
        (ValueError, "steps", lambda: adapt.tent(network(), steps=0)),
        (ValueError, "clean must give at least one batch", lambda: adapt.eata(network(), clean=[])),
        (TypeError, "model must return logits.*got str", lambda: adapt.tent(Says())(stream()[0])),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> str:
        return "a word"


def test_it_is_found_from_the_package():
    assert pylosses.adapt.tent is adapt.tent
