"""What the head costs: CPU time and memory of forward + backward, ours and others', for one batch of DPO pairs.

    make bench-head                       # or: python bench/head.py [--cell f32-32k] [--rounds 3] [--json PATH]

Every contender computes the gradient of a DPO loss over the same 4 pairs (8 sequences of 512 positions, H = 1024), of
which a third or all are completions. Who can take the reference's log-probabilities is given them; who cannot (naive,
Liger, TRL as it runs without Triton) is given a reference head and hidden states. Times are CPU seconds of one thread,
the contenders in turn within one process, medians over the rounds; memory is the peak beyond inputs, weight and
gradients, each in a process of its own. Peers that are not installed are left out:
pip install --no-deps trl==1.16.0 liger-kernel==0.8.5, in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from preftune.losses import make_loss
from preftune.ops import Head, HeadOptions, sum_by_segment, token_logps
from preftune.types import SequenceLogps

PAIRS, LENGTH, WIDTH, BETA = 4, 512, 1024, 0.1
MIB = 2**20


@dataclass(frozen=True)
class Cell:
    dtype: torch.dtype
    vocabulary: int
    share: float
    frozen: bool = False


CELLS = {
    "f32-32k": Cell(torch.float32, 32768, 1 / 3),
    "bf16-32k": Cell(torch.bfloat16, 32768, 1 / 3),
    "f32-32k-all": Cell(torch.float32, 32768, 1),
    "bf16-32k-all": Cell(torch.bfloat16, 32768, 1),
    "f32-32k-frozen": Cell(torch.float32, 32768, 1 / 3, frozen=True),
    "bf16-32k-frozen": Cell(torch.bfloat16, 32768, 1 / 3, frozen=True),
    "f32-128k": Cell(torch.float32, 131072, 1 / 3),
    "bf16-128k": Cell(torch.bfloat16, 131072, 1 / 3),
    "f32-128k-frozen": Cell(torch.float32, 131072, 1 / 3, frozen=True),
    "bf16-128k-frozen": Cell(torch.bfloat16, 131072, 1 / 3, frozen=True),
}


class Inputs:
    """Hidden states of policy and reference, chosen first, then rejected, as Liger wants them."""

    def __init__(self, cell: Cell) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(cell.dtype)

        self.cell = cell
        self.hidden = random(2 * PAIRS, LENGTH, WIDTH).requires_grad_()
        self.ref_hidden = random(2 * PAIRS, LENGTH, WIDTH)
        self.weight = (random(cell.vocabulary, WIDTH) / 16).requires_grad_(not cell.frozen)
        self.ref_weight = self.weight.detach()
        labels = torch.randint(0, cell.vocabulary, (2 * PAIRS, LENGTH), generator=generator)
        start = LENGTH - round(cell.share * LENGTH)
        self.mask = (torch.arange(LENGTH) >= start).expand_as(labels)
        self.labels = torch.where(self.mask, labels, -100)
        self.targets = labels[self.mask]
        self.lengths = self.mask.sum(1)
        self.tokens = len(self.targets)
        self.ref = torch.randn(2 * PAIRS, generator=generator) - 100
        self.loss = make_loss("dpo", beta=BETA)

    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight) if t.requires_grad]

    def finish(self, policy: Tensor, ref: Tensor | None = None) -> None:
        ref = self.ref if ref is None else ref
        groups = [
            SequenceLogps(policy[part], ref[part], self.lengths[part]) for part in (slice(PAIRS), slice(PAIRS, None))
        ]
        self.loss(*groups).mean().backward()


def _full(hidden: Tensor, weight: Tensor, x: Inputs) -> Tensor:
    logits = (hidden.flatten(0, 1) @ weight.T).float()
    values = logits.log_softmax(-1).gather(-1, x.labels.clamp(min=0).flatten()[:, None]).view_as(x.labels)
    return (values * x.mask).sum(1)


def naive(x: Inputs) -> None:
    """All logits at once."""
    with torch.no_grad():
        ref = _full(x.ref_hidden, x.ref_weight, x)
    x.finish(_full(x.hidden, x.weight, x), ref)


def liger(x: Inputs) -> None:
    """Liger's fused DPO loss."""
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    function = LigerFusedLinearDPOLoss(beta=BETA, compiled=False)
    loss, _ = function(x.weight, x.hidden, x.labels, None, x.ref_hidden, x.ref_weight)
    loss.backward()


def _trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, ())[0]


def trl_all(x: Inputs) -> None:
    """TRL's chunked function as TRL runs it without Triton: every position, and the reference."""
    labels = x.labels.clamp(min=0).flatten()

    def score(hidden: Tensor, weight: Tensor) -> Tensor:
        return (_trl(hidden.flatten(0, 1), weight, labels).view_as(x.labels) * x.mask).sum(1)

    with torch.no_grad():
        ref = score(x.ref_hidden, x.ref_weight)
    x.finish(score(x.hidden, x.weight), ref)


def trl_compacted(x: Inputs) -> None:
    """TRL's chunked function on completion positions only."""
    x.finish(sum_by_segment(_trl(x.hidden[x.mask], x.weight, x.targets), x.lengths))


def torch_cross_entropy(x: Inputs) -> None:
    """torch's chunked linear_cross_entropy: the plain sum, since it takes no gradient per token."""
    options = torch.nn.LinearCrossEntropyOptions()
    F.linear_cross_entropy(x.hidden[x.mask], x.weight, x.targets, reduction="sum", options=options).backward()


def ours(with_ref: bool = False, **options: object) -> Callable[[Inputs], None]:
    chosen = HeadOptions(**options)  # type: ignore[arg-type]

    def run(x: Inputs) -> None:
        ref = None
        if with_ref:
            with torch.no_grad():
                values = token_logps(x.ref_hidden[x.mask], Head(x.ref_weight), x.targets, chosen)
                ref = sum_by_segment(values, x.lengths)
        values = token_logps(x.hidden[x.mask], Head(x.weight), x.targets, chosen)
        x.finish(sum_by_segment(values, x.lengths), ref)

    return run


CONTENDERS: dict[str, Callable[[Inputs], None]] = {
    "naive + ref head": naive,
    "Liger + ref head": liger,
    "TRL, all positions + ref head": trl_all,
    "TRL compacted, ref given": trl_compacted,
    "torch linear_cross_entropy (sum)": torch_cross_entropy,
    "ours, ref given": ours(),
    "ours + ref head": ours(with_ref=True),
    "ours, keep": ours(strategy="keep"),
    "ours, recompute": ours(strategy="recompute"),
    "ours, recompute, 128-token chunks": ours(strategy="recompute", chunk=128),
    "ours, compiled": ours(backend="compiled"),
}
NEEDS = {"Liger": "liger_kernel", "TRL": "trl"}


class Products:
    """The bare products, with the shapes, layouts and dtype of ours: 4THV for a frozen head, 6THV for a trained one."""

    def __init__(self, x: Inputs) -> None:
        self.hidden, self.weight, self.frozen = x.hidden.detach()[x.mask], x.weight.detach(), x.cell.frozen
        self.chunk = HeadOptions().plan(self.hidden, Head(self.weight), False).chunk
        # Values that are gradients' in size: the speed of a product does not depend on them unless they are denormal.
        self.logits = torch.full((x.tokens, x.cell.vocabulary), 1e-3, dtype=x.cell.dtype)
        self.d_hidden, self.d_weight = torch.empty_like(self.hidden), torch.empty_like(self.weight)

    def __call__(self) -> None:
        for start in range(0, len(self.hidden), self.chunk):
            part = slice(start, start + self.chunk)
            torch.mm(self.hidden[part], self.weight.T, out=self.logits[part])
            if self.frozen:
                torch.mm(self.logits[part], self.weight, out=self.d_hidden[part])
        if not self.frozen:
            torch.mm(self.logits, self.weight, out=self.d_hidden)
            torch.mm(self.logits.T, self.hidden, out=self.d_weight)


def clocked(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def able(name: str) -> bool:
    import importlib.util

    package = NEEDS.get(name.split()[0].rstrip(","))
    return package is None or importlib.util.find_spec(package) is not None


def run_once(x: Inputs, name: str) -> float:
    for leaf in x.leaves():
        leaf.grad = None
    return clocked(lambda: CONTENDERS[name](x))


def times(cell_name: str, names: list[str], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each contender, and of the bare products, in turn within this process."""
    x = Inputs(CELLS[cell_name])
    bare = Products(x)
    taken: dict[str, list[float]] = {name: [] for name in [*names, "bare products"]}
    for turn in range(rounds + 1):
        for name in names:
            seconds = run_once(x, name)
            if turn:  # the first round warms up
                taken[name].append(seconds)
        for leaf in x.leaves():
            leaf.grad = None
        seconds = clocked(bare)
        if turn:
            taken["bare products"].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def memory(cell_name: str, name: str) -> float:
    """Peak MiB beyond inputs, weight and gradients, in a fresh process."""
    command = [sys.executable, __file__, "--memory-of", name, "--cell", cell_name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def memory_here(cell_name: str, name: str) -> float:
    """Run once on a batch of the same kind that is tiny, so that libraries are loaded, then on the real one."""
    cell = CELLS[cell_name]
    warm = Inputs(Cell(cell.dtype, 64, cell.share, cell.frozen))
    CONTENDERS[name](warm)
    x = Inputs(cell)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in x.leaves())
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak that making the inputs had
    before = _resident("VmRSS")
    CONTENDERS[name](x)
    return max(0.0, _resident("VmHWM") - before - gradients) / MIB


def _resident(kind: str) -> int:
    """Bytes of this process's memory now (VmRSS) or at most so far (VmHWM; that of getrusage counts the parent's)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))


def table(cell_name: str, seconds: dict[str, float], extra: dict[str, float]) -> list[str]:
    """Rows: seconds, ratio to ours with the reference given, share of the bare products' rate, memory."""
    cell = CELLS[cell_name]
    kind = "frozen head" if cell.frozen else "trained head"
    share = "all positions" if cell.share == 1 else "1/3 of positions"
    lines = [
        f"### {str(cell.dtype).removeprefix('torch.')}, V = {cell.vocabulary}, {share}, {kind}",
        "",
        "| | CPU s | x ours | of the bare products' rate | extra MiB |",
        "|---|---|---|---|---|",
    ]
    base, bare = seconds["ours, ref given"], seconds["bare products"]
    for name, value in seconds.items():
        rate = f"{bare / value:.0%}" if name.startswith("ours") or name == "bare products" else ""
        held = f"{extra[name]:.0f}" if name in extra else ""
        lines.append(f"| {name} | {value:.2f} | {value / base:.2f} | {rate} | {held} |")
    return lines


def machine() -> str:
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "")
    return f"{model or platform.processor()}, torch {torch.__version__}, one thread, {time.strftime('%Y-%m-%d')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", choices=list(CELLS), help="which table; all by default")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help="whom; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--json", help="write the figures there as well")
    parser.add_argument("--memory-of", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.memory_of:
        print(memory_here(asked.cell[0], asked.memory_of))
        return
    figures: dict[str, dict[str, dict[str, float]]] = {}
    print(machine())
    for cell_name in asked.cell or CELLS:
        names = [name for name in asked.contender or CONTENDERS if able(name)]
        if CELLS[cell_name].frozen:
            names = [name for name in names if "keep" not in name and "recompute," not in name]
        names = list(dict.fromkeys([*names, "ours, ref given"]))
        seconds = times(cell_name, names, asked.rounds)
        extra = {} if asked.no_memory else {name: memory(cell_name, name) for name in names}
        figures[cell_name] = {"seconds": seconds, "extra MiB": extra}
        print("", *table(cell_name, seconds, extra), sep="\n", flush=True)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "cells": figures}, file, indent=2)


if __name__ == "__main__":
    main()
