"""Check that the values of a configuration fit each other."""

import logging
from typing import TYPE_CHECKING, Any

from ipu_dynamo.optimum.incompatible import IncompatibleIPUConfigError

if TYPE_CHECKING:
    from ipu_dynamo.optimum.config import IPUConfig

log = logging.getLogger(__name__)


def layer_count(layers: Any) -> int | None:
    """On how many IPUs a list of layers is; "auto" counts as [-1]. None where a POD decides."""
    if layers is None or isinstance(layers, dict):
        return None
    return 1 if layers == "auto" else len(layers)


def check_coherence(config: "IPUConfig") -> None:
    """Raise unless training and inference fields fit each other.

    Checks on a dictionary by type of POD wait until the type is chosen.

    Raises:
        IncompatibleIPUConfigError: lists of other lengths than there are IPUs.
        ValueError: factor and splits of a layer, or splits of another length.
    """
    for twin in ("", "inference_"):
        ipus_name = f"{twin}ipus_per_replica"
        ipus = getattr(config, ipus_name)
        by_pod = ipus is None or isinstance(ipus, dict)
        proportion = getattr(config, f"{twin}matmul_proportion")
        if isinstance(proportion, list) and not by_pod and len(proportion) not in (1, ipus):
            raise _lengths(f"{twin}matmul_proportion", proportion, ipus_name, ipus)
        layers = getattr(config, f"{twin}layers_per_ipu")
        if isinstance(layers, list) and -1 not in layers and not by_pod and len(layers) != ipus:
            raise _lengths(f"{twin}layers_per_ipu", layers, ipus_name, ipus)
        for kind in ("embedding", "projection"):
            factor = f"{twin}{kind}_serialization_factor"
            splits = f"{twin}serialized_{kind}_splits_per_ipu"
            count, parts = getattr(config, factor), getattr(config, splits)
            some_by_pod = isinstance(count, dict) or isinstance(parts, dict)
            if count is not None and parts is not None and not some_by_pod:
                raise ValueError(
                    f"Only one of `{factor}={count}` and `{splits}={parts}` can be given"
                )
            if isinstance(parts, list) and not by_pod and len(parts) != ipus:
                raise ValueError(str(_lengths(splits, parts, ipus_name, ipus)))
    if config.replicated_tensor_sharding is True and config.replication_factor == 1:
        log.warning(
            "`replicated_tensor_sharding=True` has no effect with `replication_factor=1`: there is "
            "nobody to share with"
        )


def _lengths(name: str, value: Any, ipus_name: str, ipus: int) -> IncompatibleIPUConfigError:
    return IncompatibleIPUConfigError(
        f"{name}={value} should use the same number of IPUs as {ipus_name}={ipus}"
    )
