"""Offer what users call of pipelines by itself."""

from ipu_dynamo.saved_model.conversion.pipelines.find_split import find_split

__all__ = ["find_split"]
