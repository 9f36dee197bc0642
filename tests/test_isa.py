"""Are the kernels right on every instruction set? Those that this machine has are run, AVX-512 is at least compiled."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pylosses import cpu

pytestmark = pytest.mark.skipif(cpu._cpu is None, reason=f"no C++ kernels: {cpu.absent}")
HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
HAVE = [] if cpu._cpu is None else cpu._cpu.isas()


def python(isa: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYLOSSES_ISA": isa}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=HERE.parent, capture_output=True, text=True)


def test_the_baseline_is_always_there():
    assert HAVE[0] == "baseline" and len(set(HAVE)) == len(HAVE)
    if "PYLOSSES_ISA" not in os.environ:
        assert cpu.isa() == HAVE[-1], "not the widest that the machine has"


def test_info_shows_what_runs():
    """`pylosses info` names the forced instruction set, and the last bits of the results say that another code ran."""
    program = """
import json, sys
sys.path.insert(0, "tests/helpers")
import load
from pylosses import info
print(json.dumps({"facts": info.facts(), "bits": load.all_bits()}))
"""
    bits = set()
    for isa in HAVE:
        found = json.loads(python(isa, "-c", program).stdout)
        assert found["facts"]["cpu"]["instruction_set"] == isa
        assert found["facts"]["backends"]["cpu"]["available"] and isa in found["facts"]["backends"]["cpu"]["reason"]
        bits.add(json.dumps(found["bits"]))
    assert len(bits) == len(HAVE), "two instruction sets give the same bits everywhere: are they two?"


def test_an_unknown_instruction_set_is_refused_with_those_there_are():
    """Not the reference in its place without a word."""
    done = python("sse9", "-c", "import pylosses")
    message = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert message == f"ValueError: PYLOSSES_ISA must be one of {', '.join(HAVE)} on this machine and build, got sse9"


@pytest.mark.parametrize("unit", ["softmax", "margin", "entropy", "select", "region", "scores"])
def test_avx512_compiles(unit, tmp_path):
    """Where nothing can run it: a build for developers leaves out what their machine does not have."""
    if "avx512" in HAVE:
        pytest.skip("this machine runs it")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{platform.machine()} has no AVX-512")
    flags = re.search(r"add_isa\(avx512 (.*)\)", (CSRC / "CMakeLists.txt").read_text())[1].split()
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if (
        compiler is None
        or subprocess.run([compiler, *flags, "-x", "c++", "-fsyntax-only", "/dev/null"], capture_output=True).returncode
    ):
        pytest.skip("no compiler for AVX-512")
    command = [compiler, "-std=c++17", "-O0", "-w", "-fopenmp", "-DPYL_ISA=avx512", f"-I{CSRC}", *flags]
    made = tmp_path / "made.s"
    done = subprocess.run([*command, "-S", CSRC / "cpu" / f"{unit}.cpp", "-o", made], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert made.read_text().count("%zmm") > 1000
