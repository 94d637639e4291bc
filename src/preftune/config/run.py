"""The parts of a run's configuration and their rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from preftune.config.training import ineffective, training_model
from preftune.errors import nearest
from preftune.losses import Loss, get_spec, loss_names, make_loss
from preftune.train.metrics import METRICS


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        kinds = str(cls.model_fields[info.field_name].annotation)
        if isinstance(value, bool) and ("int" in kinds or "float" in kinds) and "bool" not in kinds:
            raise ValueError(f"expected a number, got {str(value).lower()}")
        return value


class AdapterConfig(_Section):
    """A low-rank adapter: a new one, or a saved one to go on from."""

    path: str | None = Field(None, description="Folder or hub name of a saved adapter to go on from.")
    r: int = Field(16, gt=0, description="Rank.")
    alpha: float = Field(32, gt=0, description="The update is scaled by alpha / r.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input while training.")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the linear layers, or all of them but the head."
    )
    dora: bool = Field(False, description="Weight-decomposed adaptation (DoRA).")
    modules_to_save: list[str] = Field([], description="Layers trained whole and saved with the adapter.")
    bias: Literal["none", "all", "lora_only"] = Field("none", description="Which biases of the base are trained.")

    @model_validator(mode="after")
    def _new_or_saved(self) -> AdapterConfig:
        # Compared with the defaults, so that a resolved configuration, which spells them all, reads back.
        fields = type(self).model_fields
        shape = sorted(name for name in fields if name != "path" and getattr(self, name) != fields[name].default)
        if self.path is not None and shape:
            raise ValueError(f"a saved adapter brings its own shape; remove {', '.join(shape)} or path")
        return self


class HeadConfig(_Section):
    """How the head is computed; none of it changes a value or gradient beyond rounding."""

    backend: Literal["auto", "naive", "chunked", "compiled"] = Field(
        "auto", description="chunked is auto; compiled needs a compiler; naive makes all logits at once."
    )
    strategy: Literal["auto", "keep", "recompute"] = Field(
        "auto", description="Of a trained head: keep logits for the backward, recompute them, or keep what fits."
    )
    chunk: int | None = Field(None, gt=0, description="Tokens whose logits are held at once.")
    budget_mib: int = Field(256, gt=0, description="Memory that logits may take at once.")


class ModelConfig(_Section):
    """The model to train."""

    name: str = Field(description="Folder, hub name, or demo:smollm2-135m-instruct.")
    revision: str | None = Field(None, description="Revision on the hub.")
    dtype: Literal["bfloat16", "float32", "float64"] = Field("bfloat16", description="What products are computed in.")
    trainable_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="What trained weights are stored in; bfloat16 rounds small updates away."
    )
    adapter: AdapterConfig | None = Field(None, description="Train an adapter; without it all weights are trained.")
    load_in_4bit: bool = Field(False, description="Keep the frozen base in 4 bits (bitsandbytes).")
    chat_template: str | None = Field(None, description="Name (chatml, plain), file or text of a chat template.")
    head: HeadConfig = Field(default_factory=HeadConfig, description="How the language-model head is computed.")
    attn_implementation: str | None = Field(None, description="transformers' name of an attention implementation.")
    dropout: bool = Field(False, description="Leave the model's own dropout on while training.")
    trust_remote_code: bool = Field(False, description="Allow code that comes with the model.")

    @model_validator(mode="after")
    def _quantized_has_adapter(self) -> ModelConfig:
        if self.load_in_4bit and self.adapter is None:
            raise ValueError("load_in_4bit: quantized weights cannot be trained; add an adapter")
        if self.trainable_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError(f"trainable_dtype: bfloat16 weights cannot compute in {self.dtype}; set dtype: bfloat16")
        return self


class DataConfig(_Section):
    """The judgements."""

    train: str = Field(description="A JSONL, JSON or Parquet file, a hub name, or demo:dpo_en_demo.")
    split: str = Field("train", description="Split of a hub data set.")
    eval: float | str | None = Field(None, description="A share of the training rows to hold out, or a file or name.")
    eval_split: str = Field("test", description="Split of a hub data set given as eval.")
    max_length: int | None = Field(
        None, gt=0, description="Tokens of prompt + completion; by default the model's context, at most 4096."
    )
    truncation: Literal["drop", "keep_start", "keep_end"] = Field(
        "drop", description="What happens to longer rows: left out (counted), or cut, keeping this part of the prompt."
    )
    bad_rows: Literal["stop", "drop"] = Field("stop", description="Whether unusable rows stop the run or are left out.")
    allow_one_class: bool = Field(False, description="Train on labels that are all true or all false.")
    seed: int = Field(0, ge=0, description="Draws the held-out share and KTO's mismatched pairs.")

    @field_validator("eval", mode="after")
    @classmethod
    def _share(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, int | float) and not 0 < value < 1:
            raise ValueError(f"a share must be > 0 and < 1, got {value}; for a file give its path")
        return value


class LossConfig(BaseModel):
    """A loss by its registered name, with its parameters beside it."""

    model_config = ConfigDict(extra="allow")
    name: str

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _registered(self) -> LossConfig:
        loss = make_loss(self.name, **(self.__pydantic_extra__ or {}))
        self.__pydantic_extra__ = dict(loss.parameters)
        return self

    def make(self) -> Loss:
        """The loss with its parameters bound."""
        return make_loss(self.name, **(self.__pydantic_extra__ or {}))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        choices = []
        for name in loss_names():
            spec = get_spec(name)
            properties: dict[str, Any] = {"name": {"const": name, "description": spec.summary}}
            for parameter in spec.parameters.values():
                bounds = TypeAdapter(parameter.annotation).json_schema()
                properties[parameter.name] = {**bounds, "default": parameter.default}
            choices.append(
                {"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False}
            )
        return {"oneOf": choices}


CACHED_ONLY = ("of", "per_token", "verify_rows", "rehash", "cache_dir")


class ReferenceConfig(_Section):
    """The frozen distribution the policy is compared with."""

    kind: Literal["auto", "cached", "adapter_off", "adapter_start", "frozen", "none"] = Field(
        "auto",
        description="cached (what auto means): log-probabilities computed once and kept. The others compute them in "
        "every step: adapter_off, adapter_start (a copy of a saved adapter), frozen (a second model).",
    )
    of: Literal["auto", "frozen", "adapter_off"] = Field(
        "auto",
        description="Whose values are cached: frozen (model, or the policy as it starts), or the base with the adapter "
        "off; auto: what makes every margin 0 at the start.",
    )
    model: str | None = Field(None, description="With frozen: another model than the starting one.")
    revision: str | None = Field(None, description="Revision of that model on the hub.")
    load_in_4bit: bool = Field(False, description="Hold that model in 4 bits (bitsandbytes).")
    per_token: bool = Field(False, description="Keep the value of each token, not of completions only.")
    verify_rows: int = Field(8, ge=0, description="Stored rows that are computed again at the start, to compare.")
    rehash: bool = Field(False, description="Hash the weights though their files look unchanged.")
    cache_dir: str | None = Field(None, description="Folder of stored values; by default in the user's cache.")

    @model_validator(mode="after")
    def _model_is_frozen(self) -> ReferenceConfig:
        if self.model is not None and self.kind in ("auto", "cached") and self.of == "auto":
            self.of = "frozen"
        frozen = self.kind == "frozen" or (self.kind in ("auto", "cached") and self.of == "frozen")
        if self.model is not None and not frozen:
            other = self.kind if self.of == "auto" else self.of
            raise ValueError(f"model goes with kind: frozen, not {other}; remove one of the two")
        for name in ("revision", "load_in_4bit"):
            if getattr(self, name) and self.model is None:
                raise ValueError(f"{name} needs model: the name of the model it is about")
        if self.kind not in ("auto", "cached"):
            fields = type(self).model_fields
            idle = [n for n in CACHED_ONLY if getattr(self, n) != fields[n].default]
            if idle:
                raise ValueError(f"{', '.join(idle)}: without effect with kind: {self.kind}; set kind: cached")
        return self


class RunConfig(_Section):
    """A whole run. Everything but `model`, `data.train` and `loss` has a default."""

    model: ModelConfig
    data: DataConfig
    loss: LossConfig
    reference: ReferenceConfig = ReferenceConfig()
    training: training_model() = Field(default_factory=lambda: training_model()())  # type: ignore[valid-type]
    output_dir: str = Field(
        "preftune-run", min_length=1, description="Where checkpoints, metrics, report and result go."
    )
    overwrite: bool = Field(False, description="Start anew in an output_dir that holds a run already.")

    @model_validator(mode="after")
    def _reference_fits(self) -> RunConfig:
        needs = get_spec(self.loss.name).needs_reference
        if needs and self.reference.kind == "none":
            raise ValueError(f"reference.kind: {self.loss.name} needs a reference; leave it out or set frozen")
        if self.reference.kind in ("adapter_off", "adapter_start") and self.model.adapter is None:
            raise ValueError(f"reference.kind: {self.reference.kind} needs model.adapter; set frozen or leave it out")
        if self.reference.of == "adapter_off" and self.model.adapter is None:
            raise ValueError("reference.of: adapter_off needs model.adapter; set frozen or leave it out")
        if self.reference.kind == "cached" and not needs:
            raise ValueError(f"reference.kind: {self.loss.name} uses no reference; leave it out")
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> RunConfig:
        training: Any = self.training
        if "eval_strategy" not in training.model_fields_set and self.data.eval is not None:
            training.eval_strategy = "epoch"
        if training.eval_strategy != "no" and self.data.eval is None:
            raise ValueError("training.eval_strategy: there is nothing to evaluate on; set data.eval")
        if training.eval_on_start and self.data.eval is None:
            raise ValueError("training.eval_on_start: there is nothing to evaluate on; set data.eval")
        wanted = training.metric_for_best_model
        if wanted is not None:
            name = wanted.removeprefix("eval_")
            if name not in METRICS:
                raise ValueError(
                    f"training.metric_for_best_model: unknown metric {wanted!r}{nearest(name, METRICS)} "
                    f"(there are: {', '.join(METRICS)})"
                )
            if training.greater_is_better is None:
                training.greater_is_better = METRICS[name]
        if (problem := ineffective(training.model_dump())) is not None:
            raise ValueError(problem)
        return self

    def resolved(self) -> dict[str, Any]:
        """All values, defaults included, as plain data that `load_config` reads back; the hub token is left out."""
        data = self.model_dump(mode="json")
        data["training"]["hub_token"] = None
        return data

    @property
    def folder(self) -> Path:
        """`output_dir` as a path."""
        return Path(self.output_dir).expanduser()
