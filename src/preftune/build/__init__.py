"""From a configuration to objects. The only place that knows everything."""

from preftune.build.data import Data, prepare_data
from preftune.build.objective import make_objective
from preftune.build.precompute import precompute
from preftune.build.results import finish, report_again
from preftune.build.run import Run, build, claim_folder, describe_processes, make_folder

__all__ = [
    "Data",
    "Run",
    "build",
    "claim_folder",
    "describe_processes",
    "finish",
    "make_folder",
    "make_objective",
    "precompute",
    "prepare_data",
    "report_again",
]
