"""What pip installs: the wheel's contents, a clean environment, no compiler, a foreign package named `kernels`."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation"]


def run(command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def build(folder, *arguments, **options):
    run([*BUILD, ROOT, "-w", folder, "-C", f"build-dir={folder}/build", *arguments], **options)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment(folder, wheel):
    """A fresh virtual environment with only `wheel` installed; torch is found in the one that runs the tests."""
    venv.create(folder)
    python = folder / "bin" / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run([sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q", "--no-deps", wheel])
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        pytest.skip("no C++ compiler on this machine")
    # What is installed is tested here, not how fast it is: one instruction set, not optimised.
    quick = "cmake.define.PYLOSSES_ISAS=none", "cmake.build-type=Debug"
    plain = {k: v for k, v in os.environ.items() if k != "PYLOSSES_CUDA_ARCHS"}
    return build(tmp_path_factory.mktemp("wheel"), *(word for setting in quick for word in ("-C", setting)), env=plain)


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("clean"), wheel)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"pylosses", next(t for t in tops if t.endswith(".dist-info"))}
    for wanted in ("pylosses/__init__.py", "pylosses/kernels/__init__.py", "pylosses/bench/run.py", "pylosses/losses/hem.py"):
        assert wanted in names
    assert "pylosses/py.typed" in names
    assert any(name.startswith("pylosses/_cpu.") for name in names)
    assert any(name.endswith("LICENSE") for name in names)
    assert not any("test_" in Path(n).name and not n.startswith("pylosses/bench/") for n in names)
    assert not any(name.endswith((".cpp", ".h", ".png", ".json")) for name in names)


def test_clean_install_runs(python, tmp_path):
    program = (
        "import torch, pylosses; x = torch.randn(4, 9, requires_grad=True);"
        "pylosses.hem_loss(x, torch.arange(4), backend='cpu').backward();"
        "print(bool(x.grad.isfinite().all()), pylosses.backends()['cpu'].reason)"
    )
    assert run([python, "-I", "-c", program], cwd=tmp_path).startswith("True C++ kernels, baseline")
    said = run([python.parent / "pylosses", "info"], cwd=tmp_path)
    assert re.search(r"^built +the C\+\+ kernels \(baseline\)$", said, re.M)
    assert "PYLOSSES_CUDA_ARCHS=all" in said, "CUDA kernels were built though nobody asked, or nothing says how to get them"


#: what a user may write: (line, part of mypy's complaint, or None)
USER = (
    ("criterion: pylosses.HEMLoss = pylosses.HEMLoss(margin=0.5, reduction='mean')", None),
    ("loss: torch.Tensor = criterion(x, y)", None),
    ("pylosses.CrossEntropyLoss(torch.ones(3), label_smoothing=0.1)", None),
    ("pylosses.cross_entropy(x, y, torch.ones(3))", None),
    ("pylosses.functional.focal_loss(x, y).backward()", None),
    ("pylosses.parallel.hem_loss(x, y).backward()", None),
    ("found: bool = pylosses.backends()['cpu'].available", None),
    ("pylosses.HEMLoss(margn=0.5)", 'Unexpected keyword argument "margn" for "HEMLoss"'),
    ("pylosses.hem_loss(x, y, margn=0.5)", 'Unexpected keyword argument "margn" for "hem_loss"'),
    ("pylosses.FocalLoss(gamma='2')", 'Argument "gamma" to "FocalLoss" has incompatible type "str"'),
    ("pylosses.EntropyLoss(torch.ones(3))", 'Argument 1 to "EntropyLoss" has incompatible type "Tensor"'),
    ("words: str = criterion(x, y)", "Incompatible types in assignment"),
    ("pylosses.hem", 'has no attribute "hem"'),
)


def test_type_checkers_see_signatures(python, tmp_path):
    pytest.importorskip("mypy")
    before = ["import torch", "import pylosses", "x, y = torch.zeros(2, 3), torch.tensor([0, 1])"]
    (tmp_path / "user.py").write_text("\n".join([*before, *(line for line, _ in USER)]))
    if (ROOT / ".mypy_cache").exists():  # of `make lint`, which has read torch
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / ".mypy_cache")
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--python-executable", python, "user.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    errors = dict(re.findall(r"^user\.py:(\d+): error: (.*)$", said, re.M))
    for number, (line, complaint) in enumerate(USER, len(before) + 1):
        found = errors.pop(str(number), None)
        assert (found is None) if complaint is None else complaint in (found or ""), f"{line}: {found}"
    assert not errors, said


def test_a_foreign_kernels_package_is_left_alone(python, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("whose = 'theirs'\n")
    program = "import kernels, pylosses.kernels; print(kernels.whose, pylosses.kernels.__name__)"
    assert run([python, "-c", program], cwd=tmp_path) == "theirs pylosses.kernels"


def test_source_folder_is_not_importable_as_kernels():
    done = subprocess.run([sys.executable, "-c", "import kernels"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "pylosses.kernels" in done.stderr


def test_no_compiler_installs_and_runs_on_the_reference(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("cmake", "ninja"):
        found = shutil.which(tool, path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
        (tools / tool).symlink_to(found)
    bare = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "CUDACXX")} | {"PATH": str(tools)}
    wheel = build(tmp_path, env=bare)
    assert not any(name.startswith("pylosses/_cpu.") for name in zipfile.ZipFile(wheel).namelist())
    python = environment(tmp_path / "env", wheel)
    program = (
        "import torch, pylosses; x = torch.randn(4, 9, requires_grad=True); pylosses.hem_loss(x, torch.arange(4)).backward();"
        "print(pylosses.backends()['cpu'].available, pylosses.backends()['cpu'].reason)"
    )
    said = run([python, "-I", "-c", program], cwd=tmp_path)
    assert said.startswith("False") and "no C++ compiler" in said
    assert "no C++ compiler" in run([python.parent / "pylosses", "info"], cwd=tmp_path)


def test_importing_pylosses_imports_nothing_heavy():
    program = "import sys, torch; before = set(sys.modules); import pylosses; print(sorted(set(sys.modules) - before))"
    new = run([sys.executable, "-c", program])
    for heavy in ("triton", "rich", "matplotlib", "numpy", "pylosses.bench", "pylosses.cli"):
        assert f"'{heavy}'" not in new, heavy


def test_import_is_silent_without_numpy():
    absent = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
import sys; sys.meta_path.insert(0, Absent())
"""
    done = subprocess.run([sys.executable, "-c", absent + "import pylosses"], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
