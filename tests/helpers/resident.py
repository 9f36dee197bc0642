"""What this process allocates: by torch's allocator, and as its resident memory."""

from pathlib import Path

import pytest
import torch


def allocations(action) -> tuple[list[int], object]:
    """Sizes in bytes of what torch's allocator handed out during `action`, and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = action()
    events = profile.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0], result


def peak() -> int:
    """Largest resident size of this process in bytes since the last reset."""
    return _status("VmHWM")


def resident() -> int:
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of this process cannot be measured here: {error}")
