"""The policies, by the names that the setting `policy` has."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from pagewire.services.router.placement.policy import Policy, PrefixPolicy, RoundRobinPolicy
from pagewire.services.router.placement.predicted import PredictedPolicy

POLICIES: Mapping[str, Callable[[random.Random], Policy]] = {
    "predicted": PredictedPolicy,
    "prefix": PrefixPolicy,
    "round_robin": lambda _rng: RoundRobinPolicy(),
}
