"""The run as typed, validated data. YAML is its spelling; see `RunConfig`."""

from preftune.config.read import dump_yaml, load_config
from preftune.config.run import AdapterConfig, DataConfig, LossConfig, ModelConfig, ReferenceConfig, RunConfig
from preftune.config.training import training_arguments

__all__ = [
    "AdapterConfig",
    "DataConfig",
    "LossConfig",
    "ModelConfig",
    "ReferenceConfig",
    "RunConfig",
    "dump_yaml",
    "load_config",
    "training_arguments",
]
