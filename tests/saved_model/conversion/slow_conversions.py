"""Convert in a process of its own, slowly where files appear."""

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from ipu_dynamo.saved_model.conversion import convert as conversion
from tests.saved_model.converting import embedded

PAUSE = 0.5  # seconds before files appear: whoever decides meanwhile decides wrong


def convert_slowly(source: Path, out: Path, cache: str, batch_size: int, told: Any) -> None:
    """Convert with an executable in `cache`; tell how it went."""
    torch.set_num_threads(1)
    os.environ["IPU_DYNAMO_ENGINE"] = "eager"
    warnings.simplefilter("ignore")
    publish = conversion.publish

    def slowly(*arguments: Any) -> None:
        time.sleep(PAUSE)
        publish(*arguments)

    conversion.publish = slowly
    try:
        conversion.convert(source, out, **embedded(cache, batch_size=batch_size))
    except Exception as error:
        told.put(f"{type(error).__name__}: {error}")
    else:
        told.put("")
