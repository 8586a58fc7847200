"""Show, run and convert saved programs: folders of `torch.export` archives with tags, signatures.

Reading a program runs nothing of its files, and its results are the module's. `python -m
ipu_dynamo.saved_model` and the script `ipu-saved-model` are the commands.
"""

from typing import TYPE_CHECKING, Any

from ipu_dynamo.saved_model.load import available_tag_sets, load
from ipu_dynamo.saved_model.save import save
from ipu_dynamo.saved_model.signature import Signature

if TYPE_CHECKING:
    from ipu_dynamo.saved_model.conversion.convert import convert

__all__ = ["Signature", "available_tag_sets", "convert", "load", "save"]


def __getattr__(name: str) -> Any:
    """`convert` brings the compiler, which `load` alone does not need."""
    if name != "convert":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ipu_dynamo.saved_model.conversion.convert import convert

    return convert
