"""Name the categories into which bytes of memory fall, on IPUs and on this computer."""

from collections.abc import Mapping
from typing import Literal, get_args

from ipu_dynamo.program.liveness.live_tensors import Role

CategoryName = Literal[
    "weights",
    "accumulators",
    "optimiser state",
    "stash and stream buffers",
    "constants and seeds",
    "vertex state and code",
    "exchange and control code",
    "activations",
    "temporaries",
]
CATEGORIES: tuple[CategoryName, ...] = get_args(CategoryName)
CATEGORY_OF: Mapping[Role, CategoryName] = {
    "weight": "weights",
    "accumulator": "accumulators",
    "state": "optimiser state",
    "stash": "stash and stream buffers",
    "stream": "stash and stream buffers",
    "constant": "constants and seeds",
    "activation": "activations",
}
