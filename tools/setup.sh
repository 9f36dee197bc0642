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
command -v "${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null || fail "no C++ compiler; install g++ (or set CXX)"

if [ ! -f .venv/.torch ]; then
    free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1024)}')
    [ "$free" -ge 3000 ] || fail "3000 MB of disk are needed for the environment, $free MB are free"
    say "creating .venv"
    "$PYTHON" -m venv .venv
    say "installing torch 2.13.0"
    .venv/bin/pip install -q --disable-pip-version-check torch==2.13.0
    touch .venv/.torch
fi

# Rebuild when the kernels or the build changed.
stamp=$(cat pyproject.toml csrc/CMakeLists.txt csrc/*/*.h csrc/*/*.cpp | cksum)
if [ "$(cat .venv/.built 2>/dev/null || true)" != "$stamp" ]; then
    say "installing the tools and building pylosses"
    # Instruction sets that this machine runs; `pip install .` builds all of them.
    isas=$(grep -q avx512bw /proc/cpuinfo 2>/dev/null && echo 'avx2;avx512' || echo avx2)
    # Not newer than the Triton that the kernels were tested with; torch for CUDA has pinned an older one, which stays.
    .venv/bin/pip install -q --disable-pip-version-check -e '.[bench,lint,test,transformers,triton]' torch==2.13.0 \
        -C cmake.define.PYLOSSES_ISAS="$isas" 'triton<=3.9.0; sys_platform == "linux"'
    # The editable install also puts the source tree and the folder above it on sys.path, where everybody would take the folders
    # in them for packages: transformers for one looks for a `kernels`.
    sed -i '/^\//d' .venv/lib/python*/site-packages/_editable_skbc_pylosses.pth
    echo "$stamp" >.venv/.built
fi
say "ready: $(.venv/bin/python -c 'import pylosses; print("pylosses", pylosses.__version__, "with", ", ".join(b.name for b in pylosses.backends() if b.available))')"
