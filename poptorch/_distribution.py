"""Name the version of PopTorch that this package stands for; refuse to run next to Graphcore's."""

from importlib import metadata

__version__ = "3.4.0+ipu.dynamo"

_DISTRIBUTION, _LABEL = "poptorch", "+ipu.dynamo"


def refuse_foreign_distribution() -> None:
    """Raise if Graphcore's distribution is installed: two packages would share one name.

    Raises:
        ImportError: naming the version that was found.
    """
    for found in metadata.distributions(name=_DISTRIBUTION):
        if _LABEL not in found.version:
            raise ImportError(
                f"Graphcore's own poptorch {found.version} is installed beside the poptorch of "
                f"ipu_dynamo, and both have the same import name: uninstall one of them, for "
                f"example with `pip uninstall poptorch`",
                name=_DISTRIBUTION,
            )
