"""A short run of `make fuzz`, and whether it would find a wrong loss."""

import fuzz
import pytest
import ranks
import torch
from recipes import LAYOUTS, Recipe, judge

import pylosses


@pytest.mark.parametrize("seed", range(3))
def test_random_calls(seed):
    fuzz.batch(seed, 80)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_random_calls_of_two_processes():
    with ranks.Pair() as pair:
        fuzz.batch(0, 40, pair.judge, losses=ranks.LOSSES)


def test_a_wrong_loss_is_found_and_shrunk(monkeypatch):
    """Off by 0.1 % in one layout of wide rows: the finding names just that."""
    right = pylosses.hem_loss
    monkeypatch.setattr(pylosses, "hem_loss", lambda x, *a, **k: right(x, *a, **k) * (1.001 if x.shape[1] > 20 else 1))
    with pytest.raises(fuzz.Wrong) as found:
        fuzz.batch(0, 300, losses=("hem",))
    recipe = eval(str(found.value).rpartition("--call ")[2].strip('"'), {"Recipe": Recipe})
    assert recipe.shape[1] == 33 and recipe.layout == LAYOUTS[0] and recipe.dtype == "float32", recipe
    assert judge(recipe) is not None


def test_a_raising_call_is_a_finding():
    assert "ValueError" in fuzz.wrong(judge, Recipe("hem", own={"margin": -1.0}))
    assert fuzz.wrong(judge, Recipe("hem")) is None
