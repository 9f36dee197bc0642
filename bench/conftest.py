"""pytest-benchmark is an extra: without it there is nothing to collect here."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("pytest_benchmark") else ["test_*.py"]
