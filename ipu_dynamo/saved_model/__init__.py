"""Run and show saved programs: folders of `torch.export` archives with tags and signatures.

Reading a program runs nothing of its files, and its results are the module's. `python -m
ipu_dynamo.saved_model` and the script `ipu-saved-model` are the commands.
"""

from ipu_dynamo.saved_model.load import available_tag_sets, load
from ipu_dynamo.saved_model.save import save
from ipu_dynamo.saved_model.signature import Signature

__all__ = ["Signature", "available_tag_sets", "load", "save"]
