"""The command: runs, messages, exit codes, what is left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command import run

import tiny
from preftune.cli import main
from preftune.data import collate
from preftune.models import Policy


def test_train_leaves_a_result_that_plain_peft_loads(project, capsys):
    import peft

    code, out, err = run(capsys, "train", project / "run.yaml", "training.eval_strategy=steps", "training.eval_steps=2")
    assert code == 0, err
    folder = project / "out"
    assert "8 usable of 8 rows" in out
    assert "reference: the base model" in out
    assert "step 4/4  loss" in out
    assert "training: " in out
    assert "learning_rate 0.01" in out
    assert "training defaults: num_train_epochs 1.0, per_device_train_batch_size 4" in out
    assert f"saved in {folder}" in out
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "metrics.jsonl", "config.yaml",
            "report.html", "README.md"} <= names  # fmt: skip
    policy = Policy(peft.PeftModel.from_pretrained(tiny.llama(), folder))
    base = Policy(tiny.llama())
    batch = collate(tiny.rows(4).examples)
    assert not torch.allclose(policy.sequence_logps(batch), base.sequence_logps(batch))
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval_rewards/accuracies" in entry for entry in entries) == 2
    card = (folder / "README.md").read_text()
    assert "dpo (beta 0.1" in card
    assert "adapter switched off" in card
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "adapter switched off" in page


def test_the_saved_config_trains_again_to_the_same_figures(project, capsys):
    run(capsys, "train", project / "run.yaml")
    again = project / "again"
    code, _, err = run(capsys, "train", project / "out" / "config.yaml", f"output_dir={again}")
    assert code == 0, err
    losses = [
        [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (project / "out", again)
    ]
    assert losses[0] == losses[1]


def test_full_fine_tuning_and_kto_from_pairs(project, capsys):
    code, out, err = run(
        capsys, "train", project / "run.yaml", "model.adapter=null", "loss={name: kto}", "training.max_steps=2"
    )
    assert code == 0, err
    assert "labels: 8 desirable, 8 undesirable" in out
    assert "as it was at the start" in out
    from transformers import AutoModelForCausalLM

    assert "rewards/accuracies (training)" in (project / "out" / "README.md").read_text().replace("\\_", "_")
    model = AutoModelForCausalLM.from_pretrained(project / "out")
    assert not torch.equal(model.model.norm.weight, tiny.llama().model.norm.weight)
    assert (project / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("kind", ["adapter_start", "auto"])
def test_going_on_from_a_saved_adapter(project, capsys, kind):
    run(capsys, "train", project / "run.yaml")
    code, out, err = run(
        capsys, "train", project / "run.yaml", f"output_dir={project / 'second'}",
        f"model.adapter={{path: {project / 'out'}}}", "training.learning_rate=0", f"reference.kind={kind}",
    )  # fmt: skip
    assert code == 0, err
    assert "as it was at the start" in out
    assert "the saved adapter goes on top of" in out
    entries = [json.loads(line) for line in (project / "second" / "metrics.jsonl").read_text().splitlines()]
    margins = [entry["rewards/margins"] for entry in entries if "loss" in entry]
    assert all(m == 0 if kind == "adapter_start" else abs(m) < 1e-5 for m in margins)
    assert not (project / "second" / "reference").exists()


def test_a_run_is_not_written_over_unasked_and_is_resumed_when_asked(project, capsys):
    save = SAVE
    assert run(capsys, "train", project / "run.yaml", *save)[0] == 0
    code, _, err = run(capsys, "train", project / "run.yaml", *save)
    assert code == 2
    assert "holds a run already" in err
    resume = "training.resume_from_checkpoint=true"
    code, out, err = run(capsys, "train", project / "run.yaml", *save, resume)
    assert code == 0, err
    assert "nothing left to do" in out
    code, _, err = run(capsys, "train", project / "run.yaml", *save, resume, "loss.beta=0.3", "training.max_steps=6")
    assert code == 2
    assert "loss.beta: saved 0.1, now 0.3" in err
    assert run(capsys, "train", project / "run.yaml", *save, resume, "training.max_steps=6")[0] == 0
    entries = [json.loads(line) for line in (project / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in entries if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert run(capsys, "train", project / "run.yaml", *save, "overwrite=true")[0] == 0


SAVE = ("training.save_strategy=steps", "training.save_steps=2")
RESUME = "training.resume_from_checkpoint=true"


def test_a_run_stopped_before_its_result_was_saved_is_saved_by_a_resume(project, capsys):
    assert run(capsys, "train", project / "run.yaml", *SAVE)[0] == 0
    result = [project / "out" / name for name in ("adapter_model.safetensors", "report.html", "README.md")]
    saved = result[0].read_bytes()
    for path in result:
        path.unlink()
    code, out, err = run(capsys, "train", project / "run.yaml", *SAVE, RESUME)
    assert code == 0, err
    assert "nothing left to do" in out
    assert all(path.exists() for path in result)
    assert result[0].read_bytes() == saved


def test_a_start_that_fails_leaves_no_run_and_a_refused_resume_no_trace(project, capsys):
    assert run(capsys, "train", project / "run.yaml", "data.train=none.jsonl")[0] == 2
    assert run(capsys, "train", project / "run.yaml", *SAVE)[0] == 0
    before = (project / "out" / "config.yaml").read_text()
    assert run(capsys, "train", project / "run.yaml", *SAVE, RESUME, "loss.beta=0.2")[0] == 2
    assert (project / "out" / "config.yaml").read_text() == before


def test_the_saved_config_says_what_the_run_is_not_how_it_was_started(project, capsys):
    run(capsys, "train", project / "run.yaml", *SAVE)
    run(capsys, "train", project / "run.yaml", *SAVE, RESUME, "training.max_steps=6")
    saved = project / "out" / "config.yaml"
    assert run(capsys, "train", saved, f"output_dir={project / 'again'}")[0] == 0
    run(capsys, "train", project / "run.yaml", *SAVE, "overwrite=true")
    assert run(capsys, "train", saved)[0] == 2, "the saved configuration does not write over the run"


def test_an_overwritten_runs_checkpoints_go_with_it(project, capsys):
    run(capsys, "train", project / "run.yaml", *SAVE)
    assert run(capsys, "train", project / "run.yaml", *SAVE, "overwrite=true", "training.max_steps=2")[0] == 0
    assert [path.name for path in (project / "out").glob("checkpoint-*")] == ["checkpoint-2"]


MISTAKES = {
    "no file": (["train", "none.yaml"], "none.yaml: cannot be read"),
    "typo": (["train", "RUN", "loss.betta=1"], "did you mean 'beta'?"),
    "no such model": (["train", "RUN", "model.name=nobody/nothing"], "model.name: 'nobody/nothing'"),
    "no such data": (["train", "RUN", "data.train=none.jsonl"], "none.jsonl: no such file"),
    "too long": (
        ["train", "RUN", "data.max_length=1000"],
        "data.max_length: 1000 is more than the model's 256 positions",
    ),
    "no such asset": (["train", "RUN", "data.train=demo:dpo_en_dem"], "did you mean 'dpo_en_demo'?"),
    "all too long": (["train", "RUN", "data.max_length=3"], "0 usable of 8 rows"),
    "wrong target": (["train", "RUN", "model.adapter.target_modules=[query]"], "linear layers of this model"),
    "missing package": (["train", "RUN", "training.optim=adamw_8bit"], "bitsandbytes"),
    "no tracker": (["train", "RUN", "training.report_to=clearml"], "training.report_to: clearml is not installed"),
    "bad field": (["train", "RUN", "training.fp16=true"], "training.fp16: cannot be True"),
    "reference": (["train", "RUN", "reference={model: nobody/nothing}"], "nobody/nothing"),
    "reference name": (["train", "RUN", "reference={model: nobody/x}"], "reference.model: 'nobody/x'"),
    "no run": (["report", "."], "no metrics.jsonl there"),
    "long name": (["train", "RUN", "data.train=" + 5000 * "a"], "no file can have this name"),
    "no name": (["train", "RUN", 'output_dir="a\\0b"'], "output_dir:"),
    "no folder": (["train", "RUN", "output_dir=/proc/nothing"], "output_dir: /proc/nothing cannot be written"),
    "no demo folder": (["demo", "--output-dir", "/proc/nothing"], "output_dir: /proc/nothing cannot be written"),
    "a file": (["demo", "--output-dir", "run.yaml"], "output_dir: run.yaml cannot be written"),
    "a date": (["train", "RUN", "output_dir=2020-13-45"], "the value of output_dir: not valid YAML"),
    "optimizer options": (
        ["train", "RUN", "training.optim=sgd", "training.optim_args=momentum=big"],
        "training.optim: sgd cannot be used",
    ),
    "galore": (["train", "RUN", "training.optim=galore_adamw"], "training.optim: galore_adamw cannot be used"),
    "lomo": (["train", "RUN", "training.optim=lomo"], "training.optim: lomo cannot be used"),
    "hub": (["train", "RUN", "training.push_to_hub=true"], "training.push_to_hub: the hub cannot be reached"),
    "adapter": (["train", "RUN", "model.adapter={path: .}"], "model.adapter.path: no adapter for this model at '.'"),
    "misspelt target": (
        ["train", "RUN", "model.adapter.target_modules=[q_proj, v_prj]"],
        "model.adapter.target_modules: the model has no layer 'v_prj'; did you mean 'v_proj'?",
    ),
    "misspelt module": (
        ["train", "RUN", "model.adapter.modules_to_save=[foo]"],
        "model.adapter.modules_to_save: the model has no layer 'foo'",
    ),
    "revision": (["train", "RUN", "model.revision=abc"], "model.revision: "),
    "split": (["train", "RUN", "data.split=test"], "data.split: has no effect"),
    "eval split": (["train", "RUN", "data.eval_split=dev"], "data.eval_split: has no effect"),
    "template": (["train", "RUN", "model.chat_template=none.jinja"], "model.chat_template"),
    "unknown command": (["trian"], "No such command"),
    "unknown option": (["train", "--fast"], "No such option"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_users_mistake_is_a_message_and_exit_code_2(project, capsys, monkeypatch, case):
    monkeypatch.chdir(project)
    arguments, words = MISTAKES[case]
    code, _, err = run(capsys, *["run.yaml" if a == "RUN" else a for a in arguments])
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_a_resumed_finished_run_keeps_its_best_model(project, capsys):
    best = ("training.eval_strategy=steps", "training.eval_steps=2", "training.load_best_model_at_end=true",
            "training.metric_for_best_model=logps/rejected", "training.greater_is_better=true")  # fmt: skip
    assert run(capsys, "train", project / "run.yaml", *SAVE, *best)[0] == 0
    weights = (project / "out" / "adapter_model.safetensors").read_bytes()
    last = (project / "out" / "checkpoint-4" / "adapter_model.safetensors").read_bytes()
    assert weights != last, "the last is not the best here"
    assert run(capsys, "train", project / "run.yaml", *SAVE, *best, RESUME)[0] == 0
    assert (project / "out" / "adapter_model.safetensors").read_bytes() == weights


def test_a_checkpoint_of_another_folder_does_not_make_its_run_ones_own(project, capsys):
    """A folder that holds a run is not written over, and a run that goes on elsewhere takes its metrics along."""
    start = ("train", project / "run.yaml", *SAVE)
    assert run(capsys, *start)[0] == 0
    assert run(capsys, *start, f"output_dir={project / 'other'}", "training.learning_rate=0.1")[0] == 0
    resume = f"training.resume_from_checkpoint={project / 'out' / 'checkpoint-2'}"
    code, _, err = run(capsys, *start, f"output_dir={project / 'other'}", resume)
    assert code == 2
    assert "holds a run already" in err
    assert run(capsys, *start, f"output_dir={project / 'other'}", resume, "overwrite=true")[0] == 0
    losses = [
        [json.loads(line).get("loss") for line in (project / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("out", "other")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("layers", [1, 4])
def test_an_adapter_of_another_model_is_refused(project, capsys, layers):
    tiny.llama(num_hidden_layers=layers).save_pretrained(project / "model")
    tiny.tokenizer().save_pretrained(project / "model")
    other = f"model.name={project / 'model'}"
    assert run(capsys, "train", project / "run.yaml", other)[0] == 0
    start = (f"output_dir={project / 'second'}", f"model.adapter={{path: {project / 'out'}}}")
    code, _, err = run(capsys, "train", project / "run.yaml", *start)
    assert code == 2
    assert "was made for another model" in err


def damaged(folder, name, content):
    path = folder / name
    assert path.exists()
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["trainer_state.json", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_a_damaged_checkpoint_is_a_message(project, capsys, name):
    assert run(capsys, "train", project / "run.yaml", *SAVE)[0] == 0
    damaged(project / "out" / "checkpoint-4", name, b"{")
    resume = f"training.resume_from_checkpoint={project / 'out' / 'checkpoint-4'}"
    code, _, err = run(capsys, "train", project / "run.yaml", *SAVE, resume, "training.max_steps=6")
    assert code == 2
    assert "training.resume_from_checkpoint" in err
    code, _, err = run(capsys, "train", project / "run.yaml", *SAVE, RESUME, "training.max_steps=6")
    assert code == (0 if name == "trainer_state.json" else 2), "a checkpoint without its state is passed over"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_model.safetensors", b"{"),
        ("adapter_config.json", b"{}"),
        ("adapter_config.json", b'{"peft_type": "NEW"}'),
        ("adapter_config.json", b"["),
    ],
)
def test_a_damaged_adapter_is_a_message(project, capsys, name, content):
    assert run(capsys, "train", project / "run.yaml")[0] == 0
    damaged(project / "out", name, content)
    start = (f"output_dir={project / 'second'}", f"model.adapter={{path: {project / 'out'}}}")
    code, _, err = run(capsys, "train", project / "run.yaml", *start)
    assert code == 2
    assert "model.adapter.path: no adapter for this model" in err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"{", "could not be loaded"),
        ("config.json", b"{", "its config.json cannot be used"),
        ("config.json", b"[]", "its config.json cannot be used"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "big"}', "model.name"),
        ("tokenizer.json", b"{", "no usable tokenizer"),
    ],
)
def test_a_damaged_model_is_a_message(project, capsys, tiny_folder, name, content, words):
    shutil.copytree(tiny_folder, project / "model")
    damaged(project / "model", name, content)
    code, _, err = run(capsys, "train", project / "run.yaml", f"model.name={project / 'model'}")
    assert code == 2
    assert words in err


def test_weights_that_are_no_numbers_are_a_message(project, capsys):
    model = tiny.llama()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(project / "model")
    tiny.tokenizer().save_pretrained(project / "model")
    code, _, err = run(capsys, "train", project / "run.yaml", f"model.name={project / 'model'}")
    assert code == 2
    assert "own log-probabilities are not finite (nan)" in err


def test_a_tokenizer_that_is_larger_than_the_model_is_a_message(project, capsys):
    tiny.llama(vocab_size=100).save_pretrained(project / "model")
    tiny.tokenizer().save_pretrained(project / "model")
    code, _, err = run(capsys, "train", project / "run.yaml", f"model.name={project / 'model'}")
    assert code == 2
    assert "the model's embedding only 100 rows" in err


def test_a_cut_metrics_file_and_damaged_facts(project, capsys):
    assert run(capsys, "train", project / "run.yaml", *SAVE)[0] == 0
    metrics = project / "out" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'{"step": 4, "lo')
    code, _, err = run(capsys, "train", project / "run.yaml", *SAVE, RESUME, "training.max_steps=6")
    assert code == 0, err
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "grad_norm" in line][-1] == 6
    damaged(project / "out", "facts.json", b"{")
    code, _, err = run(capsys, "report", project / "out")
    assert code == 2
    assert "facts.json: cannot be read; delete it" in err


def test_an_interrupted_run_says_so(project, capsys, monkeypatch):
    def stop(config, announce):
        raise KeyboardInterrupt

    monkeypatch.setattr("preftune.build.build", stop)
    code, _, err = run(capsys, "train", project / "run.yaml")
    assert code == 130
    assert "interrupted" in err


def test_bad_rows_are_shown_before_a_model_is_loaded(project, capsys, monkeypatch):
    """B08."""
    path = project / "pairs.jsonl"
    path.write_text(path.read_text() + json.dumps({"prompt": "q", "chosen": "a", "rejected": None}) + "\n")
    monkeypatch.setattr("preftune.build.run.make_objective", lambda config: pytest.fail("a model was loaded"))
    code, _, err = run(capsys, "train", project / "run.yaml")
    assert code == 2
    assert f"{path}:11: 'rejected' is null" in err


def test_one_class_is_refused_unless_allowed(project, capsys):
    """B10."""
    path = project / "good.jsonl"
    rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": True} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = (f"data.train={path}", "loss={name: kto}", "data.eval=null")
    code, _, err = run(capsys, "train", project / "run.yaml", *fields)
    assert code == 2
    assert "every row is desirable" in err
    assert run(capsys, "train", project / "run.yaml", *fields, "data.allow_one_class=true", "overwrite=true")[0] == 0
    code, _, err = run(capsys, "train", project / "run.yaml", f"data.train={path}", f"output_dir={project / 'x'}")
    assert code == 2
    assert "dpo takes pairs" in err


def test_a_small_share_of_kto_rows_may_have_one_prompt_and_one_class(project, capsys):
    rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i % 2 == 0} for i in range(10)]
    (project / "u.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for fields in (["data.eval=0.05"], [f"data.train={project / 'u.jsonl'}", "data.eval=0.05"]):
        code, _, err = run(
            capsys, "train", project / "run.yaml", "loss=kto", *fields, "overwrite=true", "training.eval_strategy=epoch"
        )
        assert code == 0, err


def test_policy_and_reference_go_through_the_same_code(project, tiny_folder, capsys):
    code, _, err = run(
        capsys, "train", project / "run.yaml", f"reference.model={tiny_folder}", "model.attn_implementation=eager",
        "model.dtype=bfloat16", "training.learning_rate=0", "model.adapter=null", "reference.kind=frozen",
    )  # fmt: skip
    assert code == 0, err
    entries = [json.loads(line) for line in (project / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {entry["rewards/margins"] for entry in entries if "loss" in entry} == {0.0}


def test_debug_shows_the_traceback(project):
    with pytest.raises(Exception, match="unknown key"):
        main(["--debug", "train", str(project / "run.yaml"), "x=1"])


def test_config_show_and_schema(project, capsys):
    code, out, _ = run(capsys, "config", "show", project / "run.yaml", "loss.beta=0.2")
    assert code == 0
    assert yaml.safe_load(out)["loss"] == {"name": "dpo", "beta": 0.2, "label_smoothing": 0.0}
    code, out, _ = run(capsys, "config", "schema")
    assert code == 0
    assert json.loads(out)["required"] == ["model", "data", "loss"]


def test_report_is_written_anew(project, capsys):
    run(capsys, "train", project / "run.yaml")
    page = project / "out" / "report.html"
    page.unlink()
    code, out, _ = run(capsys, "report", project / "out")
    assert code == 0
    assert str(page) in out
    assert page.exists()


def test_version_and_help(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("preftune ")
    assert "train" in run(capsys, "--help")[1]


@pytest.mark.distributed
def test_torchrun_trains_on_two_processes_and_prints_once(project):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "preftune"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*command, "train", str(project / "run.yaml"), "training.ddp_backend=gloo"],
        capture_output=True, text=True, timeout=240, env=environment, cwd=project,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("step 4/4") == 1
    assert "x 2 processes" in result.stdout
    assert Path(project, "out", "adapter_model.safetensors").exists()
