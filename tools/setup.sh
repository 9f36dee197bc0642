#!/bin/sh
# Makes .venv with the pinned torch, the tools and pylosses itself (built in place). Does only what is not done yet.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

fail() {
    echo "pylosses setup: $1" >&2
    exit 1
}
say() { echo "-- $1"; }

command -v "$PYTHON" >/dev/null || fail "no $PYTHON on the PATH; install Python 3.10 or newer, or set PYTHON=..."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 or newer is needed, $PYTHON is $("$PYTHON" -V)"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || fail "$PYTHON has no venv module; install python3-venv"
compiler=$(command -v "${CXX:-g++}" || command -v clang++ || true)
[ -n "$compiler" ] || say "no C++ compiler (install g++, or set CXX): the reference backend alone"

pip() { .venv/bin/pip install -q --disable-pip-version-check "$@"; }
# What pyproject.toml asks for: requirements of the build, and of the extras that are named.
requirements() {
    .venv/bin/python - "$@" <<'EOF'
import sys
from pip._vendor import tomli
with open("pyproject.toml", "rb") as file:
    project = tomli.load(file)
wanted = project["build-system"]["requires"] + ["cmake>=3.18", "ninja"] if len(sys.argv) == 1 else project["project"]["dependencies"]
for extra in sys.argv[1:]:
    wanted += project["project"]["optional-dependencies"][extra]
print(*wanted, sep="\n")
EOF
}
build() {
    # Instruction sets that this machine runs; `pip install .` builds all of them.
    isas=$(grep -q avx512bw /proc/cpuinfo 2>/dev/null && echo 'avx2;avx512' || echo avx2)
    export PATH="$PWD/.venv/bin:$PATH"
    pip --no-build-isolation --no-deps -e . -C cmake.define.PYLOSSES_ISAS="$isas"
    # The editable install also puts the source tree and the folder above it on sys.path, where everybody would take the folders
    # in them for packages: transformers for one looks for a `kernels`.
    sed -i '/^\//d' .venv/lib/python*/site-packages/_editable_skbc_pylosses.pth
}

if [ ! -d .venv ]; then
    free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1024)}')
    [ "$free" -ge 3000 ] || fail "3000 MB of disk are needed for the environment, $free MB are free"
    say "creating .venv"
    "$PYTHON" -m venv .venv
fi
# Installed or built again when what it comes from changed.
# Here CUDA kernels are asked for, where there is nvcc, for one architecture that the tests read; make cuda-full builds them all.
export PYLOSSES_CUDA_ARCHS="${PYLOSSES_CUDA_ARCHS-80}"
tools=$(cksum <pyproject.toml)
sources=$(cat pyproject.toml csrc/CMakeLists.txt csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu csrc/*/*.cmake | cksum)$compiler
old_tools=$(cat .venv/.tools 2>/dev/null || true)
old_sources=$(cat .venv/.built 2>/dev/null || true)
# `pip install '.[peers]'` puts a copy in the place of the build.
[ -f "$(echo .venv/lib/python*/site-packages/_editable_skbc_pylosses.pth)" ] || old_sources=
if [ "$old_tools" != "$tools" ]; then requirements | pip -r /dev/stdin; fi
if [ "$old_sources" != "$sources" ]; then
    [ "$PYLOSSES_CUDA_ARCHS" = none ] || ! command -v nvcc >/dev/null || cuda=" and, for the tests, CUDA kernels: some minutes more"
    say "building pylosses: about a minute on two cores${cuda-}"
    build >.venv/build.log 2>&1 &
    building=$!
fi
if [ "$old_tools" != "$tools" ]; then  # meanwhile
    say "installing torch 2.13.0 and the tools: a minute or two"
    pip torch==2.13.0
    # Not newer than the Triton that the kernels were tested with; torch for CUDA has pinned an older one, which stays.
    requirements bench lint test transformers triton | pip -r /dev/stdin torch==2.13.0 'triton<=3.9.0; sys_platform == "linux"'
    echo "$tools" >.venv/.tools
fi
if [ -n "${building-}" ]; then
    wait "$building" || {
        cat .venv/build.log >&2
        fail "the build failed"
    }
    echo "$sources" >.venv/.built
fi
say "ready: $(.venv/bin/python -c 'import pylosses; print("pylosses", pylosses.__version__, "with", ", ".join(b.name for b in pylosses.backends() if b.available))')"
