"""Do the examples in the docstrings run, and print what they say?"""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import pylosses

#: extension modules and what they hold have no Python source
SKIPPED = ("pylosses._cpu", "pylosses._cuda", "pylosses.__main__")


def modules() -> list[str]:
    """Those under the package's own folder; an editable install may add other folders to its path."""
    found = ["pylosses"]
    for module in pkgutil.walk_packages([str(Path(pylosses.__file__).parent)], "pylosses."):
        if module.name not in SKIPPED and not module.name.startswith(("pylosses.kernels", "pylosses.bench")):
            found.append(module.name)
    return found


def examples() -> list:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for name in modules():
        module = importlib.import_module(name)
        for test in finder.find(module, globs={"torch": torch, "pylosses": pylosses, **vars(module)}):
            if test.examples:
                found[test.name] = test
    return [pytest.param(test, id=name) for name, test in sorted(found.items())]


@pytest.mark.parametrize("example", examples())
def test_example(example: doctest.DocTest):
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
