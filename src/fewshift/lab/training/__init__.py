"""Training source networks."""

from fewshift.lab.training.algorithm import Algorithm, Batch, Task, Trainee
from fewshift.lab.training.catalog import ALGORITHMS, algorithm_of
from fewshift.lab.training.csg import CSG
from fewshift.lab.training.erm import ERM
from fewshift.lab.training.ibn import IBN
from fewshift.lab.training.isw import ISW
from fewshift.lab.training.iternorm import IterNorm
from fewshift.lab.training.mixstyle import MixStyle
from fewshift.lab.training.source import plan_source, train_source
from fewshift.lab.training.switchable_whitening import SwitchableWhitening

__all__ = [
    "ALGORITHMS",
    "CSG",
    "ERM",
    "IBN",
    "ISW",
    "Algorithm",
    "Batch",
    "IterNorm",
    "MixStyle",
    "SwitchableWhitening",
    "Task",
    "Trainee",
    "algorithm_of",
    "plan_source",
    "train_source",
]
