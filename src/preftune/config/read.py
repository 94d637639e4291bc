"""From YAML and `key=value` overrides to a `RunConfig`, with errors that name the key and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic import BaseModel

from preftune.config.run import RunConfig
from preftune.errors import ConfigError, first_line, nearest


class _Loader(yaml.SafeLoader):
    """YAML with numbers as people write them (`5e-7` is one; in YAML 1.1 it is text) and no key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"{_place(key_node)}: key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)|\d+\.\d*|\.\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def _place(node: Any) -> str:
    mark = node.start_mark
    return f"{mark.name}:{mark.line + 1}"


def _parse(text: str, name: str) -> Any:
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{name}{line}: not valid YAML ({reason})") from None
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # Dates and tagged scalars that are none, keys that are lists, brackets without end.
        raise ConfigError(f"{name}: not valid YAML ({first_line(error)})") from None


def load_config(source: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run.

    Args:
        source: a YAML file, or the same as plain data.
        overrides: `key.subkey=value` entries that replace values; a value is read as YAML.

    Raises `ConfigError` that names every wrong key.
    """
    if isinstance(source, dict):
        data: Any = source
        where = "the configuration"
    else:
        where = str(source)
        path = Path(source).expanduser()
        try:
            data = _parse(path.read_text(encoding="utf-8"), where)
        except OSError as error:
            raise ConfigError(f"{where}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: not UTF-8 text") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected keys (model, data, loss, ...), got {type(data).__name__}")
    for override in overrides:
        data = _override(data, override)
    try:
        return RunConfig.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where}:\n{explain(error, RunConfig)}") from None


def dump_yaml(data: dict[str, Any]) -> str:
    """Plain data as YAML that `load_config` reads back to the same values."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _override(data: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{override!r}: expected key=value, such as training.learning_rate=1e-5")
    value = _parse(text, f"the value of {key}")

    def put(node: Any, parts: list[str], path: str) -> Any:
        if not parts:
            return value
        if node is not None and not isinstance(node, dict):
            raise ConfigError(f"{override!r}: {path} is {node!r}, not a section with keys")
        return {**(node or {}), parts[0]: put((node or {}).get(parts[0]), parts[1:], f"{path}.{parts[0]}".strip("."))}

    result: dict[str, Any] = put(data, key.split("."), "")
    return result


def explain(error: pydantic.ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Every problem on a line: the dotted key, what is wrong, what is allowed."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        section = _section(model, location[:-1])
        known = list(section.model_fields) if section is not None else []
        # Branches of a union add their own tags to the location; a key of the configuration is what counts.
        path = _keys(model, location)
        key = ".".join([*([prefix] if prefix else []), *path])
        if problem["type"] == "extra_forbidden":
            allowed = ", ".join(known) if len(known) <= 20 else "the fields of transformers.TrainingArguments"
            text = f"unknown key{nearest(location[-1], known)} (allowed: {allowed})"
            if key == "training.output_dir":
                text = "set output_dir at the top level"
        elif problem["type"] == "missing":
            text = "is required"
        elif problem["type"] == "value_error":
            text = problem["msg"].removeprefix("Value error, ")
            if key and text.startswith(f"{key}."):
                key, text = "", text
        elif problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
            text = f"expected a section with keys, got {problem['input']!r}"
        else:
            message = problem["msg"].removeprefix("Input should be ")
            text = f"expected {message}, got {problem['input']!r}"
        previous = lines.get(key)
        lines[key] = text if previous is None else f"{previous}; or {text}"
    return "\n".join(f"{key}: {text}" if key else text for key, text in lines.items())


def _section(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    """The model whose fields a location's last key belongs to."""
    current: type[BaseModel] | None = model
    for part in location:
        field = current.model_fields.get(part) if current is not None else None
        if field is None:
            return None
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        current = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return current


def _keys(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    keys: list[str] = []
    for part in location:
        section = _section(model, keys)
        if keys and section is None and not part.isdigit():
            break
        keys.append(part)
    return keys
