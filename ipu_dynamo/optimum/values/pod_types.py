"""Values by the type of the POD that a program runs on, as configurations before 0.7 had them.

replication_factor={"pod4": 1, "pod16": 4, "default": 1}
"""

from collections.abc import Mapping
from typing import Any

IPUS = {"pod4": 4, "pod8": 8, "pod16": 16, "pod32": 32, "pod64": 64}
DEFAULT = "default"
KEYS = (*IPUS, "pod128", "pod256", DEFAULT)  # of a dictionary; the two are no `pod_type`


def check_pod_type(pod_type: str | None) -> None:
    """Raise ValueError for an unknown type of POD; None is no type."""
    if pod_type is not None and pod_type not in IPUS:
        raise ValueError(f"pod_type is {pod_type!r}; choose one of {', '.join(IPUS)}")


def entry(name: str, values: Mapping[str, Any], pod_type: str | None) -> Any:
    """The value of the field `name` on a type of POD; without a type, its "default".

    Raises:
        RuntimeError: there is no type and no default.
        KeyError: no entry for this type.
    """
    if pod_type is None:
        if DEFAULT not in values:
            raise RuntimeError(
                f'`{name}` has no entry "{DEFAULT}" in {dict(values)!r}: give a pod_type, one of '
                f"{', '.join(key for key in values if key in IPUS)}"
            )
        return values[DEFAULT]
    if pod_type not in values:
        raise KeyError(f"`{name}` has no entry for {pod_type} in {dict(values)!r}")
    return values[pod_type]


def check_size(
    pod_type: str, replicas: tuple[str, int | None], ipus: tuple[str, int | None]
) -> None:
    """Raise RuntimeError unless the replicas, of so many IPUs each, are on the POD.

    Args:
        replicas, ipus: name and value of each factor.
    """
    (name, count), (other, each) = replicas, ipus
    wanted = (count or 1) * (each or 1)
    if wanted > IPUS[pod_type]:
        raise RuntimeError(
            f"{name}={count} times {other}={each} needs {wanted} IPUs, but {pod_type} has "
            f"{IPUS[pod_type]}"
        )
