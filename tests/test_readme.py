"""README and docs/: tables are what the registry and the record say, code prints what is shown, links lead somewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pylosses

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
#: (page, program, what the page shows of its output)
EXAMPLES = [
    pytest.param(block[1], block[2] or "", id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.finditer(r"```python\n(.*?)```\n(?:\s*```text\n(.*?)```)?", page.read_text(), re.S))
]


def test_tables_are_generated():
    done = subprocess.run([sys.executable, ROOT / "tools" / "readme.py", "--check"])
    assert done.returncode == 0, "run `python tools/readme.py`"


@pytest.mark.parametrize(("program", "shown"), EXAMPLES)
def test_examples_print_what_is_shown(program, shown, tmp_path):
    if "transformers" in program and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    if "e-13" in shown and not pylosses.backends()["cpu"].available:
        pytest.skip("the precision of the kernels is shown, and there are none")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
    assert "pylosses" not in done.stderr and "UserWarning" not in done.stderr, "an example that warns is no example"


def test_readme_is_short_and_has_code():
    assert len((ROOT / "README.md").read_text().split()) <= 1000
    assert sum(str(example.id).startswith("README") for example in EXAMPLES) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
