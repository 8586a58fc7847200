"""Stand for Horovod in PopTorch programs, which import `horovod.torch` next to popdist.

Only `horovod.torch` is there, with few names. Horovod itself is another package.
"""

import sys
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path


def _refuse_the_real_one() -> None:
    """Raise if Horovod itself can be found: two packages would share one name.

    Raises:
        ImportError: naming its place.
    """
    places = [
        f"the distribution {found.name} {found.version}" for found in distributions(name="horovod")
    ]
    for entry in sys.path:
        spec = PathFinder.find_spec(__name__, [entry])
        if spec and spec.origin and not Path(spec.origin).samefile(__file__):
            places.append(spec.origin)
    if places:
        raise ImportError(
            f"Horovod itself is installed ({places[0]}) next to the horovod of ipu_dynamo, and "
            "both have the same import name: uninstall one of them, for example with `pip "
            "uninstall ipu_dynamo_horovod`",
            name=__name__,
        )


_refuse_the_real_one()
