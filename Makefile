# `make bench` and `make test` set everything up by themselves, in .venv; run them as often as you like.
.PHONY: bench bench-full bars gpu-check gpu-report test check sanitize lint format setup clean
BIN := .venv/bin

bench: setup
	$(BIN)/pylosses bench --quick --json bench/results/quick.json --plot bench/results

bench-full: setup
	$(BIN)/pylosses bench --peers --dtype float32 --dtype bfloat16 --json bench/results/full.json --plot bench/results/full

bars: setup
	$(BIN)/python -m pylosses.bench.bars

gpu-check: setup
	PYLOSSES_GPU_TESTS=all $(BIN)/pytest -n 2 tests/test_triton.py tests/test_triton_ptx.py
	TRITON_INTERPRET=1 PYTHONPATH=tests/gpu $(BIN)/pytest -n 2 -p faster -k triton tests/test_backends_agree.py tests/test_golden.py

gpu-report: setup
	$(BIN)/python tools/gpu_report.py

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
	$(BIN)/clang-format --dry-run --Werror csrc/*/*.h csrc/*/*.cpp

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*/*.h csrc/*/*.cpp

setup:
	@sh tools/setup.sh

clean:
	rm -rf build .venv/.built
