"""Tell users of options that are written down, and change nothing yet."""

import warnings

from ipu_dynamo.saved_model.conversion.settings.options import ConversionOptions

_DEFAULTS = ConversionOptions()


def tell_of_recorded(**values: float) -> None:
    """Warn once of available memory proportions other than the default.

    Args:
        values: by option.
    """
    given = [name for name, value in values.items() if value != getattr(_DEFAULTS, name)]
    if given:
        warnings.warn(
            f"{' and '.join(given)}: recorded, and without effect, as no machine model reads "
            "available memory proportions yet",
            stacklevel=4,
        )
