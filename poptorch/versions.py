"""Count the changes of two copies of the same values: the host's and the device's.

Files of users have these counts, pickled with their optimizers. A `DualView` of the core has a lock
and a program, and cannot be pickled.
"""


class Versions:
    """The versions of two copies of the same values: the newer one has the greater number."""

    def __init__(self) -> None:
        self.host = self.device = 0

    def host_changes(self) -> None:
        """Note that the host's copy gets values that the device has not."""
        self.host = max(self.host, self.device) + 1

    def device_changes(self) -> None:
        """Note that the device's copy gets values that the host has not."""
        self.device = max(self.host, self.device) + 1
