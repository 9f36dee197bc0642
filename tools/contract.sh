#!/bin/sh
# Is the contract between losses, drivers and backends whole? Adds a made-up loss of every family to a temporary copy of the
# tree, with tools/new_loss.py, builds it, and runs what the registry's grids make of the newcomers: agreement, edges, properties,
# the table of losses, and the sanitizers. No file but the tool knows them. `tools/contract.sh cpu` leaves the interpreted and the
# sanitized runs out.
set -eu
cd "$(dirname "$0")/.."
source=$PWD bin=$PWD/.venv/bin
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
say() { echo "-- $1"; }

git ls-files --cached --others --exclude-standard | while read -r file; do
    [ ! -f "$file" ] || cp -P --parents "$file" "$copy"
done
cd "$copy"
# A .venv that has everything of the tree's own but pylosses, which is the copy's: a path in a .pth is searched, its own .pth not read.
"$bin/python" -m venv --without-pip .venv
site=$(echo .venv/lib/python*/site-packages)
mkdir package
ln -s ../pylosses package/pylosses
ln -s ../kernels ../bench pylosses
{ echo "$copy/package"; "$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } >"$site/copy.pth"

for family in softmax margin entropy select region; do
    "$bin/python" tools/new_loss.py "newcomer_$family" --family $family >/dev/null
    say "added newcomer_$family"
done
"$bin/ruff" check -q pylosses/losses kernels/losses
"$bin/ruff" format -q --check pylosses/losses kernels/losses
"$bin/clang-format" --dry-run --Werror csrc/losses/*.h

say "building the copy: about a minute on two cores"
{
    PATH="$bin:$PATH" cmake -S csrc -B build/contract -G Ninja -DPYLOSSES_ISAS=avx2 -DPython_EXECUTABLE="$bin/python" \
        -Dpybind11_DIR="$("$bin/python" -m pybind11 --cmakedir)" -DPYLOSSES_CUDA_ARCHS=none
    PATH="$bin:$PATH" ninja -C build/contract
} >build.log 2>&1 || { cat build.log; exit 1; }
cp build/contract/_cpu*.so build/contract/_build.py pylosses/
.venv/bin/python -c 'import pylosses; assert pylosses.__file__.startswith("'"$copy"'") and pylosses.backends()["cpu"].available'

test() { .venv/bin/python -m pytest -q -n "${JOBS:-2}" "$@"; }
test tests/test_registry.py
grids="backends_agree edges properties ahead plain arguments torch_integration regions selection peers_defects under_load memory parallel"
test -k newcomer $(printf 'tests/test_%s.py ' ${grids})
[ "${1-}" != cpu ] || exit 0
TRITON_INTERPRET=1 PYTHONPATH=tests/gpu test -p faster -k "newcomer and triton and not float16" tests/test_backends_agree.py \
    tests/test_edges.py
PYL_LOSSES=newcomer sh tools/sanitize.sh
say "the newcomers of all families are safe"
