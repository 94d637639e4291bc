"""The objective (policy + reference + loss) and the Trainer around it."""

from preftune.train.objective import Objective, ObjectiveOutput
from preftune.train.trainer import PreferenceTrainer

__all__ = ["Objective", "ObjectiveOutput", "PreferenceTrainer"]
