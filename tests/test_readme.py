"""The README's table is what the registry says, and its example runs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_table_is_generated():
    done = subprocess.run([sys.executable, ROOT / "tools" / "readme.py", "--check"])
    assert done.returncode == 0, "run `python tools/readme.py`"


def test_examples_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        if "transformers" in block and importlib.util.find_spec("transformers") is None:
            continue
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "True" in done.stdout
