"""What a run tells while it runs: a metrics file, a progress bar or plain lines, tokens per second."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

METRICS_FILE = "metrics.jsonl"
# What a line on the terminal shows, in this order, where it is known.
SHOWN = (
    "loss",
    "rewards/accuracies",
    "rewards/margins",
    "kl",
    "sampled_kl",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
)


class MetricsFile(TrainerCallback):
    """Writes every logged entry to `metrics.jsonl`: one object per line with `step`, `epoch` and the metrics."""

    def __init__(self, output_dir: str | None) -> None:
        self.path = Path(output_dir or ".", METRICS_FILE)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the file, or go on after the step that is resumed from."""
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = b""
        if state.global_step and self.path.exists():
            lines = self.path.read_bytes().split(b"\n")
            kept = b"".join(line + b"\n" for line in lines if 0 <= _step(line) <= state.global_step)
        self.path.write_bytes(kept)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append one entry."""
        if not state.is_world_process_zero or logs is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def _step(line: bytes) -> int:
    """The step of an entry; -1 for the summary of a run that ended there, and for a line that was cut off."""
    try:
        entry = json.loads(line)
        return -1 if "train_runtime" in entry else int(entry["step"])
    except (ValueError, TypeError, KeyError):
        return -1


class LogLast(TrainerCallback):
    """Logs the last step too where it is no multiple of `logging_steps`, so that no step goes untold."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for an entry at the last step."""
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True


class Throughput:
    """Counts tokens that went through the policy and the time they took."""

    def __init__(self) -> None:
        self.tokens = 0
        self.since = self.paused = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count the tokens of one step on this rank."""
        if self.tokens == 0:
            self.since = time.perf_counter()
        self.tokens += tokens

    def pause(self) -> None:
        """Stop the clock: an evaluation begins."""
        self.paused = time.perf_counter()

    def resume(self) -> None:
        """Go on as if the pause had not been."""
        self.since += time.perf_counter() - self.paused

    def read(self) -> tuple[int, float]:
        """Tokens on this rank and seconds since the last reading, and start anew."""
        tokens, seconds = self.tokens, time.perf_counter() - self.since
        self.tokens, self.since = 0, time.perf_counter()
        return tokens, seconds


def describe_entry(logs: dict[str, float]) -> str:
    """The figures of an entry that fit a line: `loss 0.6931 | rewards/accuracies 0.50 | ...`."""
    prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
    shown = []
    for name in SHOWN:
        value = logs.get(prefix + name, logs.get(name))
        if isinstance(value, int | float):
            small = value != 0 and math.isfinite(value) and abs(value) < 1e-3
            text = f"{value:.0f}" if name == "tokens_per_second" else f"{value:.2e}" if small else f"{value:.4f}"
            shown.append(f"{name} {text}")
    return " | ".join(shown)


class PlainLines(TrainerCallback):
    """One line per logged entry, for logs and pipes."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print the entry."""
        if state.is_world_process_zero and logs is not None and "train_runtime" not in logs:
            kind = "eval" if any(name.startswith("eval_") for name in logs) else "step"
            print(f"{kind} {state.global_step}/{state.max_steps}  {describe_entry(logs)}", flush=True)


class RichBar(TrainerCallback):
    """A progress bar with the latest figures beneath it, for terminals."""

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar."""
        if state.is_world_process_zero:
            self.progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=Console(stderr=True),
            )
            self.task = self.progress.add_task("training", total=state.max_steps, figures="")
            self.progress.update(self.task, completed=state.global_step)
            self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move on."""
        if self.progress is not None:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the latest figures; evaluations stay on screen above the bar."""
        if self.progress is None or logs is None or "train_runtime" in logs:
            return
        if any(name.startswith("eval_") for name in logs):
            self.progress.console.print(f"eval {state.global_step}/{state.max_steps}  {describe_entry(logs)}")
        else:
            figures = {name: value for name, value in logs.items() if name in SHOWN[:3]}
            self.progress.update(self.task, figures=describe_entry(figures))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Give the terminal back; also where training ends by an error."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def close_bars(callbacks: Iterable[TrainerCallback]) -> None:
    """Give the terminal back, however training ended."""
    for callback in callbacks:
        if isinstance(callback, RichBar):
            callback.close()


def use_own_progress(trainer: Trainer) -> None:
    """Replace transformers' bar or printer with a bar where a terminal is there, else plain lines."""
    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    trainer.add_callback(RichBar() if sys.stderr.isatty() else PlainLines())
