"""Checks names of settings: near misses are refused, other unknown ones are reported."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Mapping

from pagewire.shared.base.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "PAGEWIRE_"

# Variables of our prefix that no settings class has: those of docker-compose.yml, .env and the
# containers' start script.
_COMPOSE = {
    "BIND",
    "GPUS",
    "GPU_LOCKS",
    "KEYS",
    "MODELS",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_TRUSTED_HOST",
    "TAG",
    "TORCH",
    "TORCH_INDEX_URL",
}
_TESTS = "TEST_"
# Variables that Kubernetes sets for a Service `pagewire` or `pagewire-something`.
_SERVICE = re.compile(
    r"(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|(\w+_)?PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
# Of the part after the prefix: one wrong letter in a short name, two or three in a long one.
_ENVIRONMENT_CUTOFF = 0.85
_KEYWORD_CUTOFF = 0.6

_reported: set[str] = set()


def is_from_kubernetes(name: str, value: str) -> bool:
    """Whether a variable describes a Kubernetes Service, and so is not a setting.

    Args:
        name: without the prefix, in upper case.
        value: a Service's `..._PORT` is a URL such as `tcp://10.0.0.1:8000`.
    """
    is_url = name.endswith("PORT") and _SERVICE_URL.match(value) is not None
    return is_url or _SERVICE.fullmatch(name) is not None


def check_environment(environ: Mapping[str, str], fields: Collection[str]) -> None:
    """Refuse misspelt settings, and report other unknown ones, once in a process.

    Args:
        environ: variables of any kind; those without our prefix don't count.
        fields: names of the fields of all settings classes: an environment serves all services.

    Raises:
        ConfigError: a name is nearly that of a setting.
    """
    known = {field.upper() for field in fields} | _COMPOSE
    for variable, value in sorted(environ.items()):
        name = variable.upper().removeprefix(PREFIX)
        if name == variable.upper() or name in known or name.startswith(_TESTS):
            continue
        if is_from_kubernetes(name, value):
            continue
        nearest = difflib.get_close_matches(name, sorted(known), 1, _ENVIRONMENT_CUTOFF)
        if nearest:
            raise ConfigError(
                f"{variable} is not a setting; did you mean {PREFIX}{nearest[0]}? "
                "Rename or unset it"
            )
        if variable not in _reported:
            _reported.add(variable)
            logger.warning("%s is not a setting of Pagewire and has no effect", variable)


def check_keywords(names: Collection[str], fields: Collection[str]) -> None:
    """Refuse names that are not settings.

    Raises:
        ConfigError: one is not; names the nearest setting, else all of them.
    """
    for name in names:
        if name not in fields:
            nearest = difflib.get_close_matches(name, sorted(fields), 1, _KEYWORD_CUTOFF)
            known = ", ".join(sorted(fields))
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {known}"
            raise ConfigError(f"{name} is not a setting; {hint}")
