"""Errors name the key and what is allowed; every field of TrainingArguments is used, passed on or refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from preftune.config import RunConfig, dump_yaml, load_config, training_arguments
from preftune.config.training import DEFAULTS, FIXED, USED, training_model
from preftune.errors import ConfigError

RUN = """
model: {name: some/model, dtype: bfloat16, adapter: {r: 16, alpha: 32, target_modules: [q_proj, v_proj]}}
data: {train: prefs.jsonl, eval: 0.05, max_length: 2048}
loss: {name: dpo, beta: 0.1}
reference: {kind: auto}
training: {learning_rate: 5e-6, per_device_train_batch_size: 4, num_train_epochs: 1}
output_dir: runs/first
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def refused(path, *overrides):
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_the_readme_example_loads(run_file):
    config = load_config(run_file)
    assert config.training.learning_rate == 5e-6
    assert config.model.adapter.target_modules == ["q_proj", "v_proj"]
    assert config.loss.make().parameters == {"beta": 0.1, "label_smoothing": 0.0}
    assert config.training.eval_strategy == "epoch", "there is something to evaluate on"


def test_only_model_data_and_loss_are_needed():
    config = load_config({"model": {"name": "m"}, "data": {"train": "p.jsonl"}, "loss": "kto"})
    assert config.reference.kind == "auto"
    assert config.training.eval_strategy == "no"
    for missing in ("model", "data", "loss"):
        given = {"model": {"name": "m"}, "data": {"train": "p"}, "loss": "dpo"}
        del given[missing]
        with pytest.raises(ConfigError, match=f"{missing}: is required"):
            load_config(given)


@pytest.mark.parametrize("text", ["5e-7", "5.0e-7", "0.0000005", "5E-7"])
def test_numbers_as_people_write_them(run_file, text):
    """B88."""
    assert load_config(run_file, [f"training.learning_rate={text}"]).training.learning_rate == 5e-7
    assert load_config(run_file, [f"loss.beta={text}"]).loss.make().beta == 5e-7
    nested = load_config(run_file, [f"training.lr_scheduler_kwargs={{min_lr: {text}}}"])
    assert nested.training.lr_scheduler_kwargs == {"min_lr": 5e-7}


REFUSED = {
    "trainin.x=1": "trainin: unknown key; did you mean 'training'?",
    "loss.betta=0.3": "loss.betta: dpo has no such parameter; did you mean 'beta'?",
    "loss.beta=0": "loss.beta: must be > 0, got 0",
    "loss.beta=-0.1": "loss.beta: must be > 0",
    "loss.beta=big": "loss.beta: expected a finite number, got 'big'",
    "loss.label_smoothing=0.5": "loss.label_smoothing: must be < 0.5",
    "loss.name=dpoo": "unknown loss 'dpoo'; did you mean 'dpo'?",
    "loss={name: kto, label_smoothing: 0.1}": "kto does not use it; the losses that do: dpo",
    "loss={name: kto, desirable_weight: -1}": "loss.desirable_weight: must be >= 0",
    "model.dtype=bf16": "model.dtype: expected 'bfloat16', 'float32' or 'float64', got 'bf16'",
    "model.adapter.r=0": "model.adapter.r: expected greater than 0, got 0",
    "model.adapter.rank=4": "model.adapter.rank: unknown key",
    "model.adapter.dropout=1": "model.adapter.dropout: expected less than 1",
    "model.adapter.path=x": "model.adapter: a saved adapter brings its own shape; remove target_modules or path",
    "model={name: m, load_in_4bit: true}": "load_in_4bit: quantized weights cannot be trained",
    "model=3": "model: expected a section with keys, got 3",
    "data.eval=1.5": "data.eval: a share must be > 0 and < 1",
    "data.max_length=0": "data.max_length: expected greater than 0",
    "data.truncation=left": "data.truncation: expected 'drop', 'keep_start' or 'keep_end'",
    "reference.kind=none": "reference.kind: dpo needs a reference",
    "reference={kind: adapter_off, model: m}": "model goes with kind: frozen",
    "reference.revision=abc": "revision needs model",
    "training.learning_rat=1": "training.learning_rat: unknown key; did you mean 'learning_rate'?",
    "training.learning_rate=fast": "training.learning_rate: expected a valid number",
    "training.learning_rate=-1": "training.learning_rate: expected greater than or equal to 0",
    "training.per_device_train_batch_size=0": "training.per_device_train_batch_size: expected greater than 0",
    "training.gradient_accumulation_steps=0": "training.gradient_accumulation_steps: expected greater than 0",
    "training.lr_scheduler_type=cosin": "unknown value 'cosin'; did you mean 'cosine'?",
    "training.optim=adam": "training.optim: unknown value 'adam'",
    "training.output_dir=x": "training.output_dir: set output_dir at the top level",
    "training.metric_for_best_model=rewards/accuracy": "did you mean 'rewards/accuracies'?",
    "training.seed=-1": "training.seed: expected greater than or equal to 0",
    "training.max_steps=0": "training.max_steps: must be > 0, or -1",
    "training.adam_beta1=5": "training.adam_beta1: expected less than 1",
    "training.adam_epsilon=-1": "training.adam_epsilon: expected greater than or equal to 0",
    "training.log_level=foo": "training.log_level: unknown value 'foo'",
    "training.save_strategy=best": "training.save_strategy: best needs training.metric_for_best_model",
    "training.save_steps=5": "training.save_steps: has no effect without training.save_strategy: steps",
    "training.eval_steps=5": "training.eval_steps: has no effect without training.eval_strategy: steps",
    "training.hub_model_id=me/x": "training.hub_model_id: has no effect without training.push_to_hub: true",
    "training.greater_is_better=true": "has no effect without training.metric_for_best_model",
    "training.dataloader_persistent_workers=true": "no effect without training.dataloader_num_workers > 0",
    "training.dataloader_multiprocessing_context=foo": "dataloader_multiprocessing_context: must be one of",
    "training.num_train_epochs=.inf": "training.num_train_epochs: expected a finite number",
    "training={gradient_checkpointing: true, gradient_checkpointing_kwargs: {foo: 1}}": "unknown option 'foo'",
    "training.activation_checkpointing_kwargs={debug: true}": "without training.activation_checkpointing: true",
    "training.optim_target_modules=[a]": "training.optim_target_modules: has no effect with optim adamw_torch",
    "training.hub_token=hf_x": "training.hub_token: has no effect without training.push_to_hub: true",
    "training={optim: sgd, optim_args: foo=1}": "training.optim_args: foo has no effect with optim sgd",
    "training.optim_args=foo=1": "training.optim_args: foo=1 has no effect with optim adamw_torch",
    'output_dir=""': "output_dir: expected",
    "model={name: m, dtype: float32, trainable_dtype: bfloat16}": "bfloat16 weights cannot compute in float32",
    "data.max_length=true": "data.max_length: expected a number, got true",
    "data.seed=false": "data.seed: expected a number, got false",
    "loss.beta=true": "loss.beta: expected a finite number, got True",
}


@pytest.mark.parametrize("override", list(REFUSED))
def test_wrong_values_name_the_key(run_file, override):
    assert REFUSED[override] in refused(run_file, override)


def test_all_problems_are_named_at_once(run_file):
    message = refused(run_file, "loss.beta=0", "training.seed=-1", "data.max_length=0")
    assert all(key in message for key in ("loss.beta", "training.seed", "data.max_length"))


def test_evaluating_on_nothing_is_refused(run_file):
    assert "set data.eval" in refused(run_file, "data.eval=null", "training.eval_strategy=steps")


def test_adapter_off_without_an_adapter_is_refused(run_file):
    assert "needs model.adapter" in refused(run_file, "model.adapter=null", "reference.kind=adapter_off")


def test_a_reference_model_means_frozen(run_file):
    """B74."""
    assert load_config(run_file, ["reference={model: other/model}"]).reference.of == "frozen"


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(TrainingArguments)])
def test_every_training_field_is_used_passed_on_or_refused(tmp_path, name):
    fields = training_model().model_fields
    if name == "output_dir":
        assert name in USED
        return
    assert name in fields
    if name in FIXED:
        value = FIXED[name][0]
        other = {True: False, False: True}.get(value, "something") if isinstance(value, bool) else "something"
        with pytest.raises(ConfigError, match=f"training.{name}: cannot be"):
            training_arguments(str(tmp_path), use_cpu=True, **{name: other})
        assert len(FIXED[name][1]) > 10, "the reason and the cure"
        return
    if name in USED:
        return
    value = SAMPLES.get(name, fields[name].default)
    args = training_arguments(str(tmp_path), **({"use_cpu": True} | COMPANIONS.get(name, {}) | {name: value}))
    got = getattr(args, name)
    got = getattr(got, "value", got)
    if name not in DERIVED:
        assert got == value or str(got) == str(value)


# A value that differs from the default, for fields whose passing on would else show nothing.
SAMPLES = {
    "learning_rate": 0.5,
    "num_train_epochs": 7.0,
    "max_steps": 11,
    "weight_decay": 0.3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.7,
    "adam_epsilon": 1e-3,
    "max_grad_norm": 3.0,
    "seed": 9,
    "data_seed": 8,
    "warmup_steps": 3,
    "optim": "sgd",
    "lr_scheduler_type": "cosine",
    "gradient_accumulation_steps": 5,
    "logging_steps": 2,
    "save_steps": 3,
    "eval_steps": 4,
    "save_strategy": "no",
    "eval_strategy": "epoch",
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 6,
    "dataloader_num_workers": 1,
    "save_total_limit": 5,
    "run_name": "x",
    "hub_model_id": "me/x",
    "ddp_timeout": 7,
    "activation_checkpointing": True,
    "metric_for_best_model": "loss",
    "use_cpu": True,
}
COMPANIONS = {
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "eval_steps": {"eval_strategy": "steps"},
    "save_steps": {"save_strategy": "steps"},
    "hub_model_id": {"push_to_hub": True},
    "hub_token": {"push_to_hub": True},
}
DERIVED = {"report_to", "debug", "disable_tqdm", "dataloader_pin_memory"}  # transformers rewrites these


def test_the_old_name_of_activation_checkpointing_works(tmp_path, recwarn):
    args = training_arguments(str(tmp_path), use_cpu=True, gradient_checkpointing=True)
    assert args.activation_checkpointing is True


def test_defaults_are_ours_where_they_differ():
    assert DEFAULTS.keys() <= training_model().model_fields.keys()
    assert not DEFAULTS.keys() & FIXED.keys()
    made = training_model()()
    assert all(getattr(made, name) == value for name, value in DEFAULTS.items())


def test_what_transformers_refuses_is_our_error_too(tmp_path):
    fields = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "epoch"}
    with pytest.raises(ConfigError, match=r"training: load_best_model_at_end requires"):
        training_arguments(str(tmp_path), use_cpu=True, **fields)


def test_the_resolved_config_reads_back_and_keeps_no_secret(run_file, tmp_path):
    config = load_config(run_file, ["training.hub_token=hf_secret", "training.push_to_hub=true"])
    text = dump_yaml(config.resolved())
    assert "hf_secret" not in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_config(again).resolved() == config.resolved()


def test_a_run_that_goes_on_from_an_adapter_reads_back_too(run_file):
    config = load_config(run_file, ["model.adapter={path: some/adapter}"])
    assert load_config(config.resolved()).resolved() == config.resolved()


@pytest.mark.parametrize("name", ["load_best_model_at_end", "eval_on_start"])
def test_what_needs_an_evaluation_is_refused_without_one(run_file, name):
    assert f"training.{name}: " in refused(run_file, "data.eval=null", f"training.{name}=true")


@pytest.mark.parametrize("name", ["eval_strategy", "save_strategy", "logging_strategy"])
def test_an_unquoted_no_is_no(run_file, name):
    """YAML reads it as false."""
    assert getattr(load_config(run_file, [f"training.{name}=no"]).training, name) == "no"


@pytest.mark.parametrize(
    "fields",
    [
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"lr_scheduler_type": "warmup_stable_decay"},
        {"lr_scheduler_kwargs": {"foo": 1}},
        {"lr_scheduler_kwargs": "foo"},
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path, fields):
    with pytest.raises(ConfigError, match=r"training\.lr_scheduler_type: .* lr_scheduler_kwargs"):
        training_arguments(str(tmp_path), use_cpu=True, **fields)


def test_options_of_a_schedule_that_takes_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="constant takes none"):
        training_arguments(
            str(tmp_path), use_cpu=True, lr_scheduler_type="constant", lr_scheduler_kwargs={"num_cycles": 1}
        )


def test_no_tracker_is_none(tmp_path):
    assert training_arguments(str(tmp_path), use_cpu=True, report_to=None).report_to == []


def test_yaml_merge_keys_are_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &x {name: m}\nmodel: {<<: *x, dtype: float32}\n")
    assert "a: unknown key" in refused(path)


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
def test_every_schedule_can_be_used_with_what_it_needs(tmp_path, name):
    needs = {
        "cosine_with_min_lr": {"min_lr": 1e-7},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-7},
        "warmup_stable_decay": {"num_decay_steps": 3},
    }.get(name, {})
    fields = {"lr_scheduler_type": name, "lr_scheduler_kwargs": needs, "eval_strategy": "steps", "eval_steps": 5}
    assert training_arguments(str(tmp_path), use_cpu=True, **fields)


def test_a_tracker_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.report_to: 'wandbb' is not a tracker"):
        training_arguments(str(tmp_path), use_cpu=True, report_to="wandbb")


def test_overrides_reach_into_sections_that_are_not_there(run_file):
    config = load_config(run_file, ["reference.kind=frozen", "data.bad_rows=drop", "model.adapter=null"])
    assert (config.reference.kind, config.data.bad_rows, config.model.adapter) == ("frozen", "drop", None)
    for bad in ("loss", "=1", "loss..x=1", "loss.beta.x=1"):
        with pytest.raises(ConfigError):
            load_config(run_file, [bad])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {name: a\n", ":2: not valid YAML"),
        ("model: {}\nmodel: {}\n", ":2: key 'model' is given twice"),
        ("loss: {name: dpo, name: kto}\n", ":1: key 'name' is given twice"),
        ("- a\n", "expected keys (model, data, loss, ...), got list"),
        ("", "expected keys (model, data, loss, ...), got NoneType"),
        ("a: !!python/object:os.system {}\n", "not valid YAML"),
        ("{[a]: b}\n", "not valid YAML"),
        ("{{a: b}: c}\n", "not valid YAML"),
        ("a: \x01\n", "not valid YAML"),
        ("a: 2020-13-45\n", "not valid YAML"),
        ("a: !!int abc\n", "not valid YAML"),
        ("a: !!int\n", "not valid YAML"),
        ("a: !!binary é\n", "not valid YAML"),
        ("a: !!timestamp x\n", "not valid YAML"),
        ("a: " + 3000 * "[" + "\n", "not valid YAML"),
        ("a: &x [*x]\n", "unknown key"),
    ],
)
def test_bad_yaml_is_an_error_with_its_line(tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert words in refused(path)


def test_a_missing_file_is_an_error(tmp_path):
    assert "cannot be read (No such file or directory)" in refused(tmp_path / "none.yaml")


def test_the_schema_knows_every_loss_and_bound():
    schema = RunConfig.model_json_schema()
    text = json.dumps(schema)
    assert '"exclusiveMinimum": 0' in text
    losses = schema["$defs"]["LossConfig"]["oneOf"]
    assert {choice["properties"]["name"]["const"] for choice in losses} >= {"dpo", "kto"}
    assert all(choice["additionalProperties"] is False for choice in losses)
    assert schema["required"] == ["model", "data", "loss"]
