"""Say that a configuration does not fit itself, or does not fit a model."""


class IncompatibleIPUConfigError(ValueError):
    """Values of a configuration contradict each other, or the model that it is used for."""
