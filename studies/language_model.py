"""A small Llama with and without the patch: the same loss curve, and what it takes of memory and time."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pylosses.integrations.transformers import patch

from . import pictures
from .data import Data
from .study import Measures, Part, Results, Study, table

#: name -> is the model patched, and how many threads
VARIANTS = {"unpatched": (False, 1), "unpatched, 2 threads": (False, 2), "patched": (True, 1)}

SETTINGS = {
    "steps": 200, "batch": 8, "length": 64, "words": 8000, "hidden": 64, "layers": 2, "rate": 1e-3,
    "memory_words": 25600, "memory_limit": 1024, "largest_batch": 128,
}  # fmt: skip


@cache
def tokens(data: Data, words: int) -> Tensor:
    """The text by words: the commonest have a number each, all others share 0."""
    text = data.text().split()
    known = {word: i + 1 for i, (word, _) in enumerate(Counter(text).most_common(words - 1))}
    return torch.tensor([known.get(word, 0) for word in text])


def llama(words: int, s: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=s["hidden"], intermediate_size=2 * s["hidden"], num_hidden_layers=s["layers"],
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=s["length"],
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def measure(part: Part) -> Measures:
    s = part.settings
    patched, threads = VARIANTS[part.variant]
    text = tokens(part.data, s["words"])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(part.seed)
    model = llama(s["words"], s)
    if patched:
        patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s["rate"], fused=True)
    generator = torch.Generator().manual_seed(part.seed)
    losses, seconds = [], 0.0
    for step in range(s["steps"]):
        starts = torch.randint(0, len(text) - s["length"], (s["batch"],), generator=generator)
        ids = torch.stack([text[i : i + s["length"]] for i in starts.tolist()])
        began = time.process_time()
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        seconds += time.process_time() - began
        losses.append(loss.item())
        part.progress((step + 1) / s["steps"] * 0.7)
    torch.set_num_threads(before)
    found: Measures = {"losses": losses, "tokens per second": s["steps"] * s["batch"] * s["length"] / seconds}
    if threads == 1:
        found["memory"] = memory(patched, s)
    return found


def memory(patched: bool, s: dict[str, Any]) -> dict[str, float]:
    """MB that a process holds at most beyond those before its first step, by batch size; in a process of its own."""
    numbers = [int(patched), s["memory_words"], s["hidden"], s["layers"], s["length"], s["memory_limit"], s["largest_batch"]]
    command = [sys.executable, "-m", "studies.language_model", "--memory", *map(str, numbers)]
    root = Path(__file__).resolve().parent.parent
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    return {batch: float(held) for batch, held in (line.split() for line in answer.splitlines())}


def hold_memory(patched: int, words: int, hidden: int, layers: int, length: int, limit: int, largest: int) -> None:
    """Prints the memory of growing batches until one holds more than `limit` MB."""

    def held() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    torch.set_num_threads(1)
    model = llama(words, {"hidden": hidden, "layers": layers, "length": length})
    if patched:
        patch(model)
    model(input_ids=torch.zeros(1, 2, dtype=torch.long), labels=torch.zeros(1, 2, dtype=torch.long)).loss.backward()
    before, batch = held(), 1
    while batch <= largest:
        ids = torch.randint(0, words, (batch, length))
        model(input_ids=ids, labels=ids).loss.backward()
        print(batch, held() - before, flush=True)
        if held() - before > limit:
            break
        batch *= 2


def apart(results: Results, a: str, b: str) -> float:
    """The largest difference of two loss curves of the same seed, in nats."""
    pairs = zip(results.values(a, "losses"), results.values(b, "losses"), strict=True)
    return max(abs(x - y) for one, other in pairs for x, y in zip(one, other, strict=True))  # type: ignore[call-overload]


def fitting(held: dict[str, float], limit: float) -> str:
    batches = [int(batch) for batch, mb in held.items() if mb <= limit]
    beyond = any(mb > limit for mb in held.values())
    return f"{max(batches, default=0)}" + ("" if beyond else " or more")


def report(results: Results) -> str:
    names, s = results.variants(list(VARIANTS)), results.settings
    rows = []
    for n in names:
        last = [sum(curve[-10:]) / 10 for curve in results.values(n, "losses")]  # type: ignore[index]
        row = [n, f"{sum(last) / len(last):.4f}"]
        if VARIANTS[n][1] == 1:  # threads that wait take processor time
            held = results.values(n, "memory")[0]
            shared = str(max(int(b) for b in held if held[b] <= s["memory_limit"]))  # type: ignore[attr-defined,index]
            row += [
                results.cell(n, "tokens per second", digits=0),
                f"{held[shared]:.0f} MB at batch {shared}",
                fitting(held, s["memory_limit"]),
            ]  # type: ignore[index,arg-type]
        else:
            row += ["", "", ""]
        rows.append(row)
    head = ["model", "mean loss of the last ten steps", "tokens per second of processor time", "memory of a step"]
    text = table([*head, f"largest batch in {s['memory_limit']} MB"], rows)
    if len(names) == len(VARIANTS):
        spread, change = apart(results, "unpatched", "unpatched, 2 threads"), apart(results, "unpatched", "patched")
        loss = max(results.values("unpatched", "losses")[0])  # type: ignore[call-overload]
        steps = change / (torch.finfo(torch.float32).eps * 2 ** math.floor(math.log2(loss)))
        text += (
            f"\nOver {s['steps']} steps the curves of the unpatched model with one and with two threads are at most "
            f"{spread:.1e} nats apart, those of the unpatched and the patched one {change:.1e}: "
            f"{'within' if change <= spread else 'beyond'} that spread, {steps:.0f} steps of float32 at this loss.\n"
        )
    return text + (
        f"\nA Llama of {s['layers']} layers and width {s['hidden']}, sequences of {s['length']} words, batch {s['batch']}, "
        f"{s['words']} words, AdamW at {s['rate']:g}, float32. Memory is that of the process beyond the model's own, for a "
        f"vocabulary of {s['memory_words']} words, forward and backward; batches are doubled. What a process "
        "needed to load the model hides the first of it, alike for both. Speed is of processor time: the "
        "machine was shared.\n"
    )


def picture(results: Results, path: Path) -> None:
    names = results.variants(list(VARIANTS))
    figure, (curves, memories) = pictures.panels(2, width=4.6, height=3.0)
    for n, style in zip(names, ("-", ":", "--"), strict=False):
        curves.plot(results.values(n, "losses")[0], style, label=n, linewidth=1.2)
    curves.set_title("loss by step, nats", fontsize=9)
    curves.legend(fontsize=7)
    for n in names:
        if VARIANTS[n][1] == 1:
            held = results.values(n, "memory")[0]
            memories.plot([int(b) for b in held], list(held.values()), "o-", label=n, markersize=4)  # type: ignore[attr-defined]
    memories.axhline(results.settings["memory_limit"], color="grey", linewidth=0.8)
    memories.set_xscale("log", base=2)
    memories.set_title("memory of a step by batch size, MB", fontsize=9)
    memories.legend(fontsize=7)
    pictures.save(figure, path)


STUDY = Study(
    name="language_model",
    question="A language model without logits: the same curve, less memory",
    variants=list(VARIANTS),
    settings=SETTINGS,
    quick={
        "steps": 10,
        "words": 100,
        "length": 16,
        "hidden": 16,
        "memory_words": 20000,
        "memory_limit": 40,
        "largest_batch": 64,
    },
    measure=measure,
    report=report,
    picture=picture,
    seeds=1,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        hold_memory(*map(int, sys.argv[2:]))
    else:
        STUDY.main()
