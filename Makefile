# `make bench` and `make test` set everything up by themselves, in .venv; run them as often as you like.
.PHONY: bench bench-full bench-twice bars gpu-check gpu-report cuda-full test check sanitize lint format setup clean
BIN := .venv/bin

bench: setup
	$(BIN)/pylosses bench --quick --json bench/results/quick.json --plot bench/results

bench-full: setup
	$(BIN)/pylosses bench --peers --dtype float32 --dtype bfloat16 --json bench/results/full.json --plot bench/results/full

# How far two full runs agree: ends with the ratios that do not.
bench-twice: setup
	$(BIN)/pylosses bench --peers --dtype float32 --dtype bfloat16 --json bench/results/first.json
	$(BIN)/pylosses bench --peers --dtype float32 --dtype bfloat16 --json bench/results/full.json --plot bench/results/full \
		--against bench/results/first.json

bars: setup
	$(BIN)/python -m pylosses.bench.bars

# Everything that can be checked of the GPU backends without a GPU. Halves take turns under Triton's interpreter (test_triton.py).
gpu-check: setup
	PYLOSSES_GPU_TESTS=all $(BIN)/pytest -n 2 tests/test_triton.py tests/test_triton_ptx.py tests/test_cuda.py tests/test_cuda_ptx.py
	TRITON_INTERPRET=1 PYTHONPATH=tests/gpu $(BIN)/pytest -n 2 -p faster -k "triton and not float16" \
		tests/test_backends_agree.py tests/test_golden.py
	PYLOSSES_CUDA_ON_CPU=1 $(BIN)/pytest -n 2 -k cuda tests/test_backends_agree.py tests/test_golden.py tests/test_edges.py

gpu-report: setup
	$(BIN)/python tools/gpu_report.py

# The CUDA kernels for every architecture, with what ptxas says of each kernel in build/cuda_full.log; make test builds one.
cuda-full: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S csrc -B build/cuda_full -G Ninja -DPYLOSSES_ISAS=none -DPYLOSSES_CUDA_ARCHS= \
		-DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_FLAGS="-Xptxas -v" -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	PATH="$(CURDIR)/$(BIN):$$PATH" ninja -v -C build/cuda_full _cuda >build/cuda_full.log
	! grep -E '[1-9][0-9]* bytes spill' build/cuda_full.log
	@echo "-- no kernel spills; registers of each: build/cuda_full.log"

test: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests

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
