"""The objective (policy + reference + loss) and the Trainer around it."""

from preftune.train.objective import Objective, ObjectiveOutput
from preftune.train.processes import leave_process_group
from preftune.train.trainer import PreferenceTrainer

__all__ = ["Objective", "ObjectiveOutput", "PreferenceTrainer", "leave_process_group"]
