"""Two more things that compiled code does with matrices, for `ptx.Sim`: copies to shared memory that end later; mma.sync."""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx import NP, PtxError, view


class Copies:
    """cp.async: bytes are read at once and arrive in shared memory when their thread waits for them, not before."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.committed = np.zeros(sim.T, np.int64)  # groups of each thread
        self.flying: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []  # threads, groups, places, bytes

    def step(self, op: list[str], ops: list[str], a: np.ndarray) -> None:
        sim = self.sim
        if op[2] == "commit_group":
            self.committed[a] += 1
        elif op[2] in ("wait_group", "wait_all"):
            self.arrive(a, int(ops[0]) if op[2] == "wait_group" else 0)
        elif op[2:5] in (["ca", "shared", "global"], ["cg", "shared", "global"]):
            size = int(ops[2], 0)
            _, to = sim.addr(ops[0], a)
            _, source = sim.addr(ops[1], a)
            wanted = sim.get(ops[3], "u32", a) if len(ops) > 3 else np.full(a.size, size, np.uint32)
            if not np.isin(wanted, (0, size)).all():
                raise NotImplementedError("a part of a copy")
            data = np.zeros((a.size, size), np.uint8)
            some = wanted > 0
            if some.any():
                data[some] = sim.load("global", source[some], size, a[some])
            self.flying.append((a, self.committed[a].copy(), to, data))
        else:
            raise NotImplementedError(".".join(op))

    def arrive(self, a: np.ndarray, left: int) -> None:
        """All copies of these threads but those of their last `left` groups."""
        still = []
        for threads, group, to, data in self.flying:
            done = np.isin(threads, a) & (group < self.committed[threads] - left)
            if done.any():
                self.sim.store("shared", to[done], data[done], threads[done])
            if not done.all():
                still.append((threads[~done], group[~done], to[~done], data[~done]))
        self.flying = still


def mma(sim: Any, op: list[str], ops: list[str], a: np.ndarray) -> None:
    """mma.sync: D = A B + C, m16n8k16 of halves with float32 sums, m8n8k4 of float64."""
    if op[1:3] != ["sync", "aligned"] or op[4:6] != ["row", "col"]:
        raise NotImplementedError(".".join(op))
    sim.check(a, np.full(a.size, 0xFFFFFFFF, np.uint32))
    warps = a.size // 32
    if warps * 32 != a.size:
        raise PtxError("mma of a part of a warp")
    to, *given = ([x.strip() for x in text.strip("{} ").split(",")] for text in ops)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    if op[3] == "m8n8k4" and op[6:] == ["f64"] * 4:
        left, right = np.zeros((warps, 8, 4)), np.zeros((warps, 4, 8))
        left[:, g, t] = sim.get(given[0][0], "f64", a).reshape(warps, 32)
        right[:, t, g] = sim.get(given[1][0], "f64", a).reshape(warps, 32)
    elif op[3] == "m16n8k16" and op[7] in ("bf16", "f16") and op[6:] == ["f32", op[7], op[7], "f32"]:
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        for i, register in enumerate(given[0]):
            low, high = _halves(sim.get(register, "b32", a).reshape(warps, 32), op[7])
            left[:, g + 8 * (i % 2), 2 * t + 8 * (i // 2)] = low
            left[:, g + 8 * (i % 2), 2 * t + 8 * (i // 2) + 1] = high
        for i, register in enumerate(given[1]):
            right[:, 2 * t + 8 * i, g], right[:, 2 * t + 8 * i + 1, g] = _halves(
                sim.get(register, "b32", a).reshape(warps, 32), op[7]
            )
    else:
        raise NotImplementedError(".".join(op))
    product = left @ right
    for i, register in enumerate(given[2]):
        total = product[:, g + 8 * (i // 2), 2 * t + i % 2] + sim.get(register, op[6], a).reshape(warps, 32)
        sim.put(to[i], total.astype(NP[op[6]]).ravel(), op[6], a)


def _halves(raw: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The two numbers of each register, low and high."""
    both = (raw & np.uint32(0xFFFF), raw >> np.uint32(16))
    low, high = (view(part.astype(np.uint16), kind) for part in both)
    return low, high
