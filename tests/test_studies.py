"""Do the studies run, resume, say where their numbers come from, and measure what they say?"""

import gzip
import importlib
import importlib.util
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pylosses

ROOT = Path(__file__).parent.parent
pytest.importorskip("sklearn", reason="pip install scikit-learn")
pytest.importorskip("matplotlib", reason="pip install '.[bench]'")


def _load() -> None:
    """The package beside the tests, without its folder on sys.path: a folder `kernels` lies there."""
    spec = importlib.util.spec_from_file_location(
        "studies", ROOT / "studies" / "__init__.py", submodule_search_locations=[str(ROOT / "studies")]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["studies"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_load()
from studies import adaptation, adr, attacks, continual, corruptions, data, hem_digits, long_tail, outliers, study  # noqa: E402
from studies import feature_contrastive as fcl_study  # noqa: E402

#: study -> variants that its quick run is tested with: enough for the report and the picture, in seconds
QUICK = {
    "hem_digits": ["CE", "HEM-"],
    "adr": ["CE", "CE + ADR, 40 % wrong labels"],
    "adaptation": ["BatchNorm: none", "BatchNorm: SAR + L_final", "BatchNorm: rates"],
    "long_tail": ["MNIST, 100, HEM", "MNIST, 10, LA"],
    "feature_contrastive": ["CE", "FCL, mean, 0.001"],
    "continual": ["split, LwF, HEM-", "split, SI, CE", "permuted, EWC, CE", "permuted, LFL, CE", "permuted, replay, CE"],
    "segmentation": ["CE", "HEM"],
    "language_model": None,
    "loss_share": ["LeNet, HEM"],
}


@pytest.mark.parametrize("name", QUICK)
def test_quick(name, tmp_path):
    if name == "language_model":
        pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    module = importlib.import_module(f"studies.{name}")
    only = QUICK[name] or module.STUDY.variants
    results = module.STUDY.main(["--quick", "--results", str(tmp_path), "--only", *only])
    stored = json.loads((tmp_path / f"{name}.json").read_text())
    assert [part["variant"] for part in stored["parts"]] == list(only)
    for part in stored["parts"]:
        assert part["commit"] and part["data"] and part["seed"] == 0
        assert str(tmp_path) not in json.dumps(part) and str(ROOT) not in json.dumps(part)
    text = (tmp_path / f"{name}.md").read_text()
    assert all(variant.split(": ")[0].split(", ")[-1] in text for variant in only) and results.origin() in text
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_every_study_is_tested_quickly_and_has_a_page():
    found = {p.stem for p in (ROOT / "studies").glob("*.py") if "STUDY = Study(" in p.read_text()}
    assert found == set(QUICK)
    for name in found:
        page = ROOT / "docs" / "studies" / f"{name}.md"
        assert f"results/{name}.png" in page.read_text() and f"python -m studies.{name}" in page.read_text()
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_command_line():
    """As the README has it, from the root; an unknown variant is an error."""
    command = [sys.executable, "-m", "studies.hem_digits", "--quick", "--only", "XE"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode and "--only XE: the variants are CE, LogitNorm" in run.stderr


def counting(tmp_path, seeds: int = 2, only=(), **settings) -> tuple[list, study.Results]:
    done = []

    def measure(part):
        done.append((part.variant, part.seed))
        part.data.used[:] = ["nothing"]
        return {"number": float(part.seed + len(part.variant)), "drawn": torch.rand(()).item()}

    made = study.Study(
        "counting", "Counting?", ["a", "bb"], {"epochs": 3, **settings}, {}, measure,
        lambda results: results.cell("a", "number"), lambda results, path: None,
    )  # fmt: skip
    more = ["--only", *only] if only else []
    return done, made.main(["--results", str(tmp_path), "--seeds", str(seeds), *more])


def test_parts_resume(tmp_path):
    done, _ = counting(tmp_path, only=["bb"])
    assert done == [("bb", 0), ("bb", 1)]
    done, results = counting(tmp_path, seeds=3)
    assert done == [("a", 0), ("a", 1), ("a", 2), ("bb", 2)]
    assert results.values("a", "number") == [1, 2, 3] and results.cell("a", "number") == "2.00 ± 1.00"
    assert counting(tmp_path, seeds=3)[0] == []
    # a part does not depend on those before it
    _, again = counting(tmp_path / "again", seeds=3)
    assert sorted(again.values("bb", "drawn")) == sorted(results.values("bb", "drawn"))


def test_results_of_other_settings_are_not_mixed(tmp_path):
    counting(tmp_path)
    with pytest.raises(SystemExit, match="holds results of other settings"):
        counting(tmp_path, epochs=4)


def test_an_interrupted_part_leaves_the_others(tmp_path):
    counting(tmp_path, only=["a"])

    def broken(part):
        raise KeyboardInterrupt

    made = study.Study("counting", "?", ["a", "bb"], {"epochs": 3}, {}, broken, lambda r: "", lambda r, p: None)
    with pytest.raises(KeyboardInterrupt):
        made.main(["--results", str(tmp_path), "--seeds", "2"])
    assert counting(tmp_path)[0] == [("bb", 0), ("bb", 1)]


def idx(array: torch.Tensor) -> bytes:
    return b"\0\0\x08" + bytes([array.dim()]) + struct.pack(f">{array.dim()}i", *array.shape) + bytes(array.flatten().tolist())


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A tiny "MNIST" at an address, with its checksums; nothing in a folder yet."""
    site, cache = tmp_path / "site", tmp_path / "cache"
    site.mkdir()
    for split, count in (("train", 5), ("t10k", 3)):
        for kind, array in (
            ("images-idx3", torch.arange(count * 4).reshape(count, 2, 2)),
            ("labels-idx1", torch.arange(count)),
        ):
            content = idx(array.byte())
            (site / f"{split}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
            monkeypatch.setitem(data.SHA256, f"mnist/{split}-{kind}-ubyte", data.hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(data.ADDRESS, "mnist", site.as_uri() + "/")
    monkeypatch.setattr(data, "CACHE", cache)
    monkeypatch.delenv("PYLOSSES_DATA", raising=False)
    return site


def test_download_checks_and_keeps(published):
    train, test = data.Data().grey("mnist")
    assert train.x.shape == (5, 1, 2, 2) and test.y.tolist() == [0, 1, 2] and train.name == "MNIST"
    assert train.x[1, 0, 1, 1].item() == pytest.approx(7 / 255)
    for file in published.iterdir():  # the address is gone: the cache has it
        file.unlink()
    assert torch.equal(data.Data().grey("mnist")[0].x, train.x)


def test_another_file_is_refused(published):
    name = published / "t10k-labels-idx1-ubyte.gz"
    name.write_bytes(gzip.compress(idx(torch.tensor([9, 9, 9]).byte())))
    with pytest.raises(ValueError, match="mnist/t10k-labels-idx1-ubyte is not the published file: sha256"):
        data.Data().grey("mnist")


def test_missing_data_says_where_it_looked(published, tmp_path):
    (published / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(data.DataMissing, match="no mnist in .*cache, and file:"):
        data.Data().grey("mnist")
    with pytest.raises(data.DataMissing, match="no camvid: looked for .*PYLOSSES_DATA, or try --quick"):
        data.Data(tmp_path).scenes((8, 8))


def test_a_folder_comes_first(published, tmp_path, monkeypatch):
    folder = tmp_path / "folder" / "mnist"
    folder.mkdir(parents=True)
    for file in published.iterdir():
        (folder / file.name[:-3]).write_bytes(gzip.decompress(file.read_bytes()))  # unpacked will do
        file.unlink()
    monkeypatch.setenv("PYLOSSES_DATA", str(folder.parent))
    assert len(data.Data().grey("mnist")[0].x) == 5


def test_corruptions_change_images_and_stay_images():
    train, _ = data.Data(quick=True).grey("mnist")
    for x in (train.x[:20], data.Data(quick=True).colour()[0].x[:20]):
        found = corruptions.corrupted(x, seed=0)
        assert len(found) == 13
        for kind, changed in found.items():
            assert changed.shape == x.shape and 0 <= changed.min() and changed.max() <= 1, kind
            assert 0.005 < (changed - x).abs().mean() < 0.7, kind
        again = corruptions.corrupted(x, seed=0)
        assert all(torch.equal(again[kind], changed) for kind, changed in found.items())


def test_corruptions_by_their_formulas():
    x = torch.full((2, 1, 28, 28), 0.25)
    g = torch.Generator().manual_seed(0)
    assert corruptions.brightness(x, 0.5, g).allclose(x + 0.5)
    blurs = ("defocus blur", "motion blur", "zoom blur", "elastic", "pixelate")
    for kind in blurs:  # a flat image stays flat
        assert corruptions.KINDS[kind](x, corruptions.MNIST_C[kind], g).std() < 1e-2, kind
    point = torch.zeros(1, 1, 28, 28)
    point[0, 0, 14, 14] = 1
    assert (corruptions.defocus_blur(point, (3, 0.1), g) > 1e-4).sum() == 29  # pixels of a disk of radius 3
    assert (corruptions.gaussian_noise(x[:1].expand(50, 1, 28, 28), 0.38, g) - 0.25).std() == pytest.approx(0.38, rel=0.02)
    assert corruptions.contrast(point, 0.1, g).max() == pytest.approx(0.1 + 0.9 / 784, rel=1e-4)


def test_unknown_images_keep_what_they_promise():
    x = data.Data(quick=True).grey("mnist")[1].x[:30]
    sets = outliers.synthetic(x, seed=0)
    assert all(s.shape == x.shape and s.min() >= 0 and s.max() <= 1 for s in sets.values())
    assert torch.equal(sets["permuted pixels"].flatten(1).sort(dim=1).values, x.flatten(1).sort(dim=1).values)
    assert not torch.equal(sets["permuted pixels"], x)
    colour = data.Data(quick=True).colour()[1].x[:5] * torch.tensor([1.0, 0.5, 0.25])[:, None, None]
    moved = outliers.permuted(colour, torch.Generator().manual_seed(0))
    assert moved[:, 1].allclose(moved[:, 0] * 0.5)  # a pixel keeps its colour


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_attack_finds_what_can_be_found(norm):
    """A linear model far from the edges of [0, 1], where it is known which images an attack can turn."""
    torch.manual_seed(0)
    x = 0.35 + 0.3 * torch.rand(200, 1, 4, 4)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5))
    weight = model[1].weight.detach()
    model[1].bias.data = -0.5 * weight.sum(dim=1)
    logits = model(x).detach()
    y = logits.argmax(dim=1)
    steepness = (weight[y][:, None] - weight[None]).norm(p=1 if norm == "linf" else 2, dim=2)  # (200, 5)
    reach = (logits.gather(1, y[:, None]) - logits) / steepness.clamp(min=1e-9)
    reach[torch.arange(200), y] = torch.inf
    nearest = reach.amin(dim=1)
    radius = nearest.median().item()
    assert 0 < radius < 0.3
    attacked = attacks.pgd(model, x, y, norm=norm, radius=radius, steps=40, seed=0)
    size = (attacked - x).flatten(1).norm(p=torch.inf if norm == "linf" else 2, dim=1)
    assert size.max() <= radius * (1 + 1e-4)
    turned = model(attacked).argmax(dim=1) != y
    assert not turned[nearest > 1.001 * radius].any()
    possible = nearest < 0.95 * radius
    assert possible.sum() > 50 and turned[possible].double().mean() > 0.97


def test_the_attack_stays_an_image():
    x = data.Data(quick=True).grey("mnist")[1].x[:20]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    attacked = attacks.pgd(model, x, torch.arange(20) % 10, norm="linf", radius=0.3, steps=5, seed=0)
    assert attacked.min() >= 0 and attacked.max() <= 1


def test_long_tails_counts():
    y = torch.arange(10).repeat(1000)
    counts = y[long_tail.long_tailed(y, 1000, 100, seed=0)].bincount()
    assert counts.tolist() == [round(1000 * 0.01 ** (c / 9)) for c in range(10)]
    assert counts[0] == 1000 and counts[9] == 10


def test_wrong_labels_are_wrong():
    y = torch.arange(10).repeat(1000)
    wrong = adr.mislabelled(y, 0.4, seed=0) != y
    assert wrong.double().mean() == pytest.approx(0.4, abs=0.02)
    assert torch.equal(adr.mislabelled(y, 0.0, seed=0), y)


def test_adrs_turning_point():
    """Known: 0.84 for ten classes and the three largest, 0.72 for two."""
    assert adr.turning_point(10, 3) == pytest.approx(0.84, abs=0.005)
    assert adr.turning_point(10, 2) == pytest.approx(0.715, abs=0.01)


def test_an_imbalanced_stream_has_one_class_at_a_time():
    y = torch.arange(10).repeat(100)
    turns = y[adaptation.imbalanced(y, 50, seed=0)].reshape(10, 100)
    favoured = [turn.mode().values.item() for turn in turns]
    assert sorted(favoured) == list(range(10))
    share = sum((turn == c).double().mean().item() for turn, c in zip(turns, favoured, strict=True)) / 10
    assert share == pytest.approx(50 / 59, abs=0.05)


def test_synthetic_digits():
    train, _ = data.Data(quick=True).grey("mnist")
    made = fcl_study.synthetic(train.x, train.y, [4] * 10 + [3] * 5, seed=0)
    assert made.y.bincount().tolist() == [4] * 10 + [3] * 5
    noisy = fcl_study.noisy(made.x, torch.ones(28, 28), seed=0)
    assert ((noisy != made.x).flatten(1).sum(dim=1) <= round(0.15 * 784)).all()
    assert ((noisy != made.x).flatten(1).sum(dim=1) > 0.14 * 784).all()
    heavy = torch.ones(28, 28)
    heavy[:14] = 1e-6
    assert (fcl_study.noisy(made.x, heavy, seed=0)[:, :, :14] == made.x[:, :, :14]).all()


def test_continual_tasks():
    train, _ = data.Data(quick=True).grey("mnist")
    split = continual.tasks(train.x, train.y, "split", None)
    assert sum(len(y) for _, y in split) == len(train.y) and all(set(y.tolist()) == {0, 1} for _, y in split)
    permuted = continual.tasks(train.x, train.y, "permuted", 50)
    assert all(torch.equal(x.flatten(1).sort(dim=1).values, train.x[:50].flatten(1).sort(dim=1).values) for x, _ in permuted)


def test_hem_digits_losses_take_the_published_margin():
    counts = torch.full((10,), 6000)
    x, y = torch.randn(6, 10), torch.arange(6)
    margin = (2000 / 60000) ** 0.5
    assert hem_digits.LOSSES["HEM-"](counts)(x, y) == pytest.approx(pylosses.hem_loss(x, y, margin=margin).item())
    assert hem_digits.LOSSES["MM"](counts)(x, y) == pytest.approx(torch.nn.functional.multi_margin_loss(x, y).item())
