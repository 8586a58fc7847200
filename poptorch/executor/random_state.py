"""Show and set the state of an executor's random numbers."""

from collections.abc import Sequence

from poptorch.errors import createPoptorchError
from poptorch.weights import DeviceWeights


class DeviceRandomState(DeviceWeights):
    """The part of an executor that knows where its random streams are."""

    @property
    def rng_state(self) -> list[int]:
        """The seed, and the device iterations that were completed since it was set.

        Setting it again repeats the runs that followed; a list of a seed alone means step 0.

        Raises:
            poptorch.Error: the model is not compiled, or these are not one or two integers.
        """
        core = self._ready()
        return list(self._weights.lock.run(lambda: core.random_state))

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        core = self._ready()
        seed, step = _seed_and_step(state)
        self._weights.lock.run(lambda: core.set_random_state(seed, step))


def _seed_and_step(state: Sequence[int]) -> tuple[int, int]:
    numbers = list(state) if isinstance(state, list | tuple) else []
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not (whole and len(numbers) in (1, 2) and all(step >= 0 for step in numbers[1:])):
        raise createPoptorchError(
            f"rng_state takes [seed, step], as it was read, or [seed], got {state!r}: a seed is an "
            "integer, a step one that is not negative",
            id="option",
        )
    return numbers[0], numbers[1] if len(numbers) == 2 else 0
