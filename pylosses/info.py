"""Facts about this installation and machine, for ``pylosses info`` and for the header of every benchmark."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from . import cpu
from .choice import backends


def facts() -> dict[str, Any]:
    """Versions, devices, backends and the CPU as plain values that JSON can hold."""
    return {
        "versions": versions(),
        "devices": devices(),
        "backends": {status.name: {"available": status.available, "reason": status.reason} for status in backends()},
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": _usable_cores(),
            "instruction_set": cpu.isa(),
            "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        },
        "built": built(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """Versions of what decides results and speed; None for what is not installed."""
    from . import __version__

    return {
        "pylosses": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "triton": _version("triton"),
    }


def built() -> str:
    """What was compiled when pylosses was installed."""
    try:
        return importlib.import_module("pylosses._build").BUILT
    except (ImportError, AttributeError):
        return "nothing"


def devices() -> list[str]:
    """``cpu`` and every CUDA device by name."""
    found = [f"cpu: {cpu_model()}"]
    if torch.cuda.is_available():
        found += [f"cuda:{i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return found


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
