"""Random calls against an oracle, with shrinking: `make fuzz SEED=1 MINUTES=10`, or one call again by its recipe."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis
import ranks
from recipes import Recipe, judge, recipes
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

#: examples between two looks at the clock
BATCH = 200


class Wrong(AssertionError):
    """The smallest call that was found to be wrong."""


def wrong(judged: Callable[[Recipe], str | None], recipe: Recipe) -> str | None:
    """What is wrong with this call; one that should work and raises is wrong too."""
    try:
        return judged(recipe)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}:{last.lineno})"


def batch(seed: int, examples: int, judged: Callable[[Recipe], str | None] = judge, **drawn: Any) -> None:
    """Raises Wrong with the shrunk call."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet, print_blob=False,
    )  # fmt: skip
    @hypothesis.given(recipes(**drawn))
    def check(recipe: Recipe) -> None:
        found = wrong(judged, recipe)
        if found is not None:
            raise Wrong(f"{found}\n  again: {repro(recipe)}")

    check()


def repro(recipe: Recipe) -> str:
    changed = {k: v for k, v in recipe._asdict().items() if k == "loss" or v != Recipe._field_defaults[k]}
    text = ", ".join(f"{k}={v!r}" for k, v in changed.items())
    return f'python tests/fuzz/fuzz.py --call "Recipe({text})"'


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch; later ones count up")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--call", help="a Recipe(...) to run once")
    parser.add_argument("--processes", type=int, choices=(1, 2), help="only calls in one process, or only over two")
    parser.epilog = "A finding is shrunk to a minimal call, printed with the line that runs it again."
    asked = parser.parse_args()
    if asked.call:
        recipe = eval(asked.call, {"Recipe": Recipe})  # noqa: S307 - a developer's own command line
        found = wrong(judge, recipe)
        print(found or "right")
        return int(found is not None)
    end, seed, calls, findings = time.monotonic() + 60 * asked.minutes, asked.seed, 0, []
    shown = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with ranks.Pair() as pair, Progress(*shown) as progress:
        task = progress.add_task("")
        while time.monotonic() < end:
            progress.update(task, description=f"seed {seed}, {calls} calls, {len(findings)} findings")
            two = asked.processes == 2 or asked.processes is None and seed % 4 == 3
            try:
                if two:
                    batch(seed, BATCH // 4, pair.judge, losses=ranks.LOSSES)
                else:
                    batch(seed, BATCH, compiled=seed % 8 == 0)
            except Wrong as error:
                findings.append(str(error))
                progress.console.print(f"seed {seed}: {error}", markup=False, highlight=False, soft_wrap=True)
            calls, seed = calls + (BATCH // 4 if two else BATCH), seed + 1
    print(f"{calls} calls, {len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
