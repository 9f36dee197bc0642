"""What a compiled kernel does in its innermost loop: loads of the logits and stores of the gradient, read off its PTX."""

from __future__ import annotations

import re
from typing import NamedTuple

import ptx
from ahead import Launch


class Accesses(NamedTuple):
    """How often each element of a block is touched."""

    loads: float  #: of the logits
    stores: float  #: of the gradient


def accesses(launch: Launch) -> list[Accesses]:
    """Of each innermost loop that touches logits or gradient; else of the whole kernel, single logits and all."""
    kernel = ptx.Kernel(launch.compiled.asm["ptx"])
    found = touched(kernel, [name for name, _ in launch.parameters()])
    numbers = launch.arguments["ROWS"] * launch.arguments["BLOCK"] / (32 * launch.warps)  # of a block, a lane
    size = launch.arguments["p_x"].element_size() * max(numbers, 1)

    def of(body: set[int]) -> Accesses:
        loads, stores = (sum(n for i, kind, n in found if kind == k and i in body) for k in ("ld p_x", "st p_grad"))
        return Accesses(loads / size, stores / size)

    busy = [body for body in loops(kernel) if any(of(body))]
    inner = [body for body in busy if not any(other < body for other in busy)]
    return [of(body) for body in inner] or [of(set(range(len(kernel.code))))]


def touched(kernel: ptx.Kernel, names: list[str]) -> list[tuple[int, str, int]]:
    """(instruction, "ld" or "st" and the pointer its address was computed from, bytes) of each access of global memory."""
    origin = {f"[{p[0]}]": name for p, name in zip(kernel.params, names, strict=False) if name.startswith("p_")}
    found = []
    for i, (_, _, op, operands, _) in enumerate(kernel.code):
        if op[0] in ("ld", "st") and "global" in op:
            address = operands[1 if op[0] == "ld" else 0].strip("[] ").partition("+")[0].strip()
            many = next((int(o[1]) for o in op if re.fullmatch(r"v\d", o)), 1)
            found.append((i, f"{op[0]} {origin[address]}", many * ptx.BITS[op[-1]] // 8))
        elif op[0] in ("ld", "mov", "cvta", "add", "mad", "selp"):
            sources = [o for text in operands[1:] for o in re.findall(r"%\w+|\[\w+\]", text) if o in origin]
            if sources:
                origin[operands[0]] = origin[sources[0]]
    return found


def loops(kernel: ptx.Kernel) -> list[set[int]]:
    """The instructions of each natural loop: a branch back to a place that every way to it passes, and what lies between."""
    code = kernel.code
    starts = sorted({0, *kernel.labels.values(), *(i + 1 for i, c in enumerate(code) if c[2][0] in ("bra", "ret", "exit"))})
    starts = [s for s in starts if s < len(code)]
    number = {s: b for b, s in enumerate(starts)}
    after: list[list[int]] = []
    for b, start in enumerate(starts):
        end = starts[b + 1] if b + 1 < len(starts) else len(code)
        predicate, _, op, operands, _ = code[end - 1]
        follows = [number[kernel.labels[operands[0]]]] if op[0] == "bra" and kernel.labels[operands[0]] in number else []
        if (op[0] not in ("bra", "ret", "exit") or predicate is not None) and end < len(code):
            follows.append(b + 1)
        after.append(follows)
        assert start < end
    before: list[set[int]] = [set() for _ in starts]
    for b, follows in enumerate(after):
        for f in follows:
            before[f].add(b)
    everything = set(range(len(starts)))
    dominators = [{0} if b == 0 else everything for b in range(len(starts))]
    changed = True
    while changed:
        changed = False
        for b in range(1, len(starts)):
            of_all = set.intersection(*(dominators[p] for p in before[b])) if before[b] else set()
            if (new := of_all | {b}) != dominators[b]:
                dominators[b], changed = new, True
    bodies: dict[int, set[int]] = {}
    for b, follows in enumerate(after):
        for head in follows:
            if head in dominators[b]:
                body, todo = {head}, [b]
                while todo:
                    if (block := todo.pop()) not in body:
                        body.add(block)
                        todo += before[block]
                bodies.setdefault(head, set()).update(body)
    ends = [*starts[1:], len(code)]
    return [{i for b in body for i in range(starts[b], ends[b])} for body in bodies.values()]
