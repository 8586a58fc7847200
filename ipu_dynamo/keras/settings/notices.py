"""Say once for each model and option that something is kept without effect."""

import logging
from collections.abc import MutableSet

logger = logging.getLogger("ipu_dynamo.keras")


def notice(seen: MutableSet[str], option: str, text: str) -> None:
    """Warn of `option` unless `seen`, the model's set of options, has it."""
    if option not in seen:
        seen.add(option)
        logger.warning("%s", text)
