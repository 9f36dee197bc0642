# `make bench` and `make test` set everything up by themselves, in .venv; run them as often as you like.
.PHONY: studies bench bench-full bars proofs gpu-report cuda-full test fuzz check contract sanitize lint format setup clean
BIN := .venv/bin
TEST := $(BIN)/pytest -q -n 2
GRID := tests/test_backends_agree.py tests/test_golden.py
# Those that this machine runs beside the widest, which is the one that tests run on.
OTHER_ISAS = $$($(BIN)/python -c "from pylosses import cpu; print(*set(cpu._cpu.isas() if cpu._cpu else ()) - {cpu.isa()})")
# What differs between instruction sets: widths, tails, conversions, maths.
DIFFERS := cpu and ((test_golden and (float32 or float64)) or test_layouts or \
	(test_rows and not float64 and (plain or peaked or masked or special or one_class or three_classes or wide)))

bench: setup
	$(BIN)/pylosses bench --quick --json bench/results/quick/cpu.json --plot bench/results/quick

# The committed record and pictures, and the tables that docs/ has of them: twenty minutes, with '.[peers]' installed.
bench-full: setup
	$(BIN)/pylosses bench --peers --json bench/results/cpu.json --plot bench/results
	$(BIN)/python tools/readme.py

# Which promises does the committed record keep?
bars: setup
	$(BIN)/python -m pylosses.bench.bars

# The long proofs, tens of minutes: every case of the GPU tests that take turns in `make test`, the agreement grid on every
# backend and instruction set, the sanitizers. None of them needs a GPU.
proofs: setup sanitize
	PYLOSSES_GPU_TESTS=all $(TEST) tests/test_triton_ptx.py tests/test_cuda.py tests/test_cuda_ptx.py
	PYLOSSES_GPU_TESTS=all TRITON_INTERPRET=1 $(TEST) tests/interpreted
	TRITON_INTERPRET=1 PYTHONPATH=tests/gpu $(TEST) -p faster -k "triton and not float16" $(GRID)
	PYLOSSES_CUDA_ON_CPU=1 $(TEST) -k cuda $(GRID) tests/test_edges.py
	for isa in $(OTHER_ISAS); do PYLOSSES_ISA=$$isa $(TEST) -k cpu $(GRID) || exit 1; done

# A made-up loss of every family, in a copy of the tree: is a newcomer safe? Ten minutes.
contract: setup
	sh tools/contract.sh

gpu-report: setup
	$(BIN)/python tools/gpu_report.py

# The CUDA kernels for every architecture, with what ptxas says of each kernel in build/cuda_full.log; make test builds one.
cuda-full: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S csrc -B build/cuda_full -G Ninja -DPYLOSSES_ISAS=none -DPYLOSSES_CUDA_ARCHS=all \
		-DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_FLAGS="-Xptxas -v" -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	PATH="$(CURDIR)/$(BIN):$$PATH" ninja -v -C build/cuda_full _cuda >build/cuda_full.log
	! grep -E '[1-9][0-9]* bytes spill' build/cuda_full.log
	@echo "-- no kernel spills; registers of each: build/cuda_full.log"

# Triton's interpreter and the choice of an instruction set are switches of a process, so each has a run of its own.
test: setup lint
	$(TEST) --dist loadfile --no-loadscope-reorder tests
	TRITON_INTERPRET=1 $(TEST) tests/interpreted
	for isa in $(OTHER_ISAS); do PYLOSSES_ISA=$$isa $(TEST) -k "$(DIFFERS)" $(GRID) || exit 1; done

# Random calls against an independent float64 oracle, in one process and two; findings are shrunk to a minimal call.
SEED ?= 0
MINUTES ?= 5
fuzz: setup
	$(BIN)/python tests/fuzz/fuzz.py --seed $(SEED) --minutes $(MINUTES)

# What the losses do for trained models; `make studies STUDY=` measures what is committed (hours; docs/studies).
STUDY = --quick
studies: setup
	for study in $$(grep -l '^STUDY = ' studies/*.py); do $(BIN)/python -m studies.$$(basename $$study .py) $(STUDY) || exit 1; done

check: setup
	$(BIN)/pylosses check

sanitize:
	sh tools/sanitize.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu tests/cuda_on_cpu/*.h tests/cuda_on_cpu/*.c*

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu tests/cuda_on_cpu/*.h tests/cuda_on_cpu/*.c*

setup:
	@sh tools/setup.sh

clean:
	rm -rf build .venv/.built
