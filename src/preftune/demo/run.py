"""`preftune demo`: KTO on single ratings and DPO on pairs, with the figures before and after."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from preftune.assets import SCHEME, fetch
from preftune.build import Run, build, claim_folder, finish, make_folder
from preftune.config import load_config
from preftune.data import PreferenceDataset, load_examples, tokenize_examples
from preftune.demo.measure import held_out_pairs, sampled_kl, side_by_side
from preftune.demo.reviews import read_sentences, split, write_paired, write_unpaired
from preftune.report import Sample, overview, write_report

MODEL = "demo:smollm2-135m-instruct"
SEED = 0
KL_SAMPLES = 32
KL_SAMPLES_ON_THE_WAY = 8
SHOWN_SAMPLES = 6
KTO_EVALUATED = 8  # one in so many held-out sentences is scored while KTO trains; its pairs are all scored at the end
ADAPTER = {"r": 16, "alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
TRAINING: dict[str, dict[str, Any]] = {
    "kto": {"per_device_train_batch_size": 8, "max_steps": 80, "eval_steps": 40},
    "dpo": {"per_device_train_batch_size": 4, "max_steps": 72, "eval_steps": 36},
}
WHAT = {
    "kto": "KTO on single sentences, liked or disliked",
    "dpo": "DPO on pairs of sentences under one prompt",
}


@dataclass(frozen=True)
class Outcome:
    """What a run reached."""

    run: Run
    before: dict[str, float]
    after: dict[str, float]
    samples: list[Sample]
    seconds: float


class _Watcher(TrainerCallback):
    """Adds the exact KL over samples of the policy to each evaluation, and keeps the figures of the first and last."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.pairs: PreferenceDataset | None = None
        self.prompts: list[list[int]] = []
        self.figures: dict[int, dict[str, float]] = {}

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Sample, measure and log."""
        assert self.run is not None
        assert self.pairs is not None
        assert metrics is not None
        policy, reference = self.run.objective.policy, self.run.objective.reference
        ends = state.global_step in (0, state.max_steps)
        prompts = self.prompts if ends else self.prompts[:: KL_SAMPLES // KL_SAMPLES_ON_THE_WAY]
        kl = sampled_kl(policy, reference, prompts, SEED)
        self.run.trainer.log({"eval_sampled_kl": kl})
        if not ends:
            return
        if self.run.objective.loss.spec.layout == "paired":  # the evaluation has just scored these very pairs
            figures = {"accuracy": metrics["eval_rewards/accuracies"], "margin": metrics["eval_rewards/margins"]}
        else:
            figures = held_out_pairs(policy, reference, self.pairs, self.run.objective.loss.beta)
        self.figures[state.global_step] = {**figures, "kl": kl}


def run_demo(folder: Path, console: Console) -> dict[str, Any]:
    """Train both runs in `folder`, print their tables, write `report.html` and `summary.json`, return the summary."""
    make_folder(folder)
    fetch(MODEL.removeprefix(SCHEME))
    train, held_out = split(read_sentences(fetch("movie_reviews")), SEED)
    console.print(
        f"movie-review sentences rated by people: {len(train.sentences)} to train on ({len(train.pairs)} pairs), "
        f"{len(held_out.sentences)} held out ({len(held_out.pairs)} pairs), "
        f"{len({s.prompt for s in train.sentences})} prompts",
        highlight=False,
    )
    write_unpaired(train, folder / "data" / "kto-train.jsonl")
    write_paired(train, folder / "data" / "dpo-train.jsonl")
    write_unpaired(held_out, folder / "data" / "kto-held-out.jsonl", every=KTO_EVALUATED)
    write_paired(held_out, folder / "data" / "dpo-held-out.jsonl")
    outcomes = {name: _one(name, folder, console) for name in ("kto", "dpo")}
    summary = {
        name: {"before": o.before, "after": o.after, "seconds": round(o.seconds, 1)} for name, o in outcomes.items()
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    reports = [
        o.run.report(WHAT[name], {key: (o.before[key], o.after[key]) for key in o.after}, o.samples, _notes(o))
        for name, o in outcomes.items()
    ]
    write_report(reports, folder / "report.html", "preftune demo: learning what people liked about films")
    for name, report in zip(outcomes, reports, strict=True):
        (folder / f"{name}.png").write_bytes(overview(report.history, report.name))
    _say(console, f"report: {folder / 'report.html'}\nfigures: {folder / 'summary.json'}")
    return summary


def _one(name: str, folder: Path, console: Console) -> Outcome:
    started = time.perf_counter()
    console.rule(WHAT[name])
    config = load_config(
        {
            "model": {"name": MODEL, "dtype": _dtype(), "adapter": ADAPTER},
            "data": {
                "train": str(folder / "data" / f"{name}-train.jsonl"),
                "eval": str(folder / "data" / f"{name}-held-out.jsonl"),
                "seed": SEED,
            },
            "loss": {"name": name, "beta": 0.1},
            "training": {
                **TRAINING[name],
                "learning_rate": 5e-4,
                "lr_scheduler_type": "constant_with_warmup",
                "warmup_steps": 5,
                "logging_steps": 1,
                "eval_strategy": "steps",
                "eval_on_start": True,
                "per_device_eval_batch_size": 16,
                "save_strategy": "no",
                "seed": SEED,
            },
            "output_dir": str(folder / name),
            "overwrite": True,
        }
    )
    claim_folder(config)
    watcher = _Watcher()
    run = build(config, callbacks=[watcher])
    for line in run.data.lines():
        _say(console, line)
    for key, value in run.facts().items():
        _say(console, f"{key}: {value}")
    pairs, prompts = _pairs(run, folder)
    watcher.run, watcher.pairs, watcher.prompts = run, pairs, prompts
    run.train()
    before, after = watcher.figures[0], watcher.figures[run.trainer.state.max_steps]
    policy, reference = run.objective.policy, run.objective.reference
    distinct = list(dict.fromkeys(tuple(p) for p in prompts))[:SHOWN_SAMPLES]
    samples = [Sample(*texts) for texts in side_by_side(policy, reference, distinct, SEED)]
    outcome = Outcome(run, before, after, samples, time.perf_counter() - started)
    _print(outcome, len(pairs), console)
    finish(run, {key: (before[key], after[key]) for key in after}, samples, _notes(outcome))
    return outcome


def _dtype() -> str:
    """bfloat16 where the processor multiplies it natively (twice as fast), float32 elsewhere."""
    native = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if native else "float32"


def _pairs(run: Run, folder: Path) -> tuple[PreferenceDataset, list[list[int]]]:
    """The held-out pairs, and held-out prompts to sample from."""
    tokenizer = run.objective.policy.tokenizer
    assert tokenizer is not None
    loaded = load_examples(folder / "data" / "dpo-held-out.jsonl")
    pairs, _ = tokenize_examples(loaded, tokenizer, max_length=512, source="held-out pairs")
    step = len(pairs) / KL_SAMPLES
    return pairs, [list(pairs[int(i * step)].prompt_ids) for i in range(KL_SAMPLES)]


def _print(outcome: Outcome, n_pairs: int, console: Console) -> None:
    table = Table(title=f"{n_pairs} held-out pairs")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    words = {
        "accuracy": "accuracy (pairs ranked right by reward, a tie counts half)",
        "margin": "margin (reward of the better - reward of the worse)",
        "kl": f"KL(policy || reference), nats per token, own samples (n={KL_SAMPLES}, seed {SEED})",
    }
    for key, text in words.items():
        table.add_row(text, f"{outcome.before[key]:.3f}", f"{outcome.after[key]:.3f}")
    console.print(table)
    side = Table(title="continuations, drawn with the same seed", show_lines=True)
    for column in ("prompt", "reference", "policy"):
        side.add_column(column)
    for s in outcome.samples:
        side.add_row(s.prompt, s.reference, s.policy)
    console.print(side)
    _say(console, f"adapter saved in {outcome.run.config.folder}, {outcome.seconds:.0f} s")


def _say(console: Console, text: str) -> None:
    """A line as it is: no markup, no colours, not wrapped where no terminal is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _notes(outcome: Outcome) -> list[str]:
    return [
        "Accuracy and margin are over held-out pairs under one prompt; a tie counts half, so at the start it is 0.5.",
        f"KL is exact over the vocabulary, averaged over the tokens of {KL_SAMPLES} samples of the policy on held-out "
        f"prompts (seed {SEED}).",
        f"{outcome.seconds:.0f} seconds in all.",
    ]
