"""Fill the store of reference values for a run, without training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import set_seed

from preftune.build.data import prepare_data
from preftune.build.objective import make_objective
from preftune.config import RunConfig, training_arguments
from preftune.data import collate
from preftune.errors import ConfigError
from preftune.reference import CachedReference
from preftune.train.guards import check_layout


def precompute(config: RunConfig, announce: Callable[[str], None]) -> dict[str, Any]:
    """Compute every reference value that training with `config` will ask for, and keep it.

    Args:
        config: the run; its output folder is left alone.
        announce: is told what was read and done, line by line.

    Returns `rows`, `hits`, `computed`, `seconds` and `namespace`. Raises `ConfigError` for a reference that is not
    cached, and `CacheError` where what was computed cannot be written.
    """
    began = time.monotonic()
    if config.reference.kind not in ("auto", "cached"):
        raise ConfigError(f"reference.kind: {config.reference.kind} keeps no values; set cached, or leave it out")
    args = training_arguments(str(config.folder), **config.training.model_dump())
    data = prepare_data(config)
    for line in data.lines():
        announce(line)
    set_seed(args.seed)
    objective = make_objective(config)
    reference = objective.reference
    if not isinstance(reference, CachedReference):
        raise ConfigError(f"loss.name: {config.loss.name} uses no reference, so there is nothing to compute")
    sets = [data.train] if data.eval is None else [data.train, data.eval]
    for dataset in sets:
        check_layout(objective, dataset)
    objective.policy.model.to(args.device)
    reference.to(args.device)
    objective.policy.self_check(collate([data.train[0]]).to(args.device))
    reference.prepare(sets, args.device, quiet=args.process_index > 0)
    for line in reference.account:
        announce(line)
    if reference.work.unsaved is not None:
        raise reference.work.unsaved
    return {
        "rows": reference.asked,
        "hits": reference.hits,
        "computed": reference.work.rows,
        "seconds": round(time.monotonic() - began, 3),
        "namespace": reference.namespace.id,
    }
