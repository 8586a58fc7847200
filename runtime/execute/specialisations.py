"""Keep the forms of a step for some hyperparameters, and make others when a step needs them.

A step is specialised for facts about its hyperparameters. A fused function leaves out those that
are zero. An update that was traced from Python is for the branches that its trace took. Whether
these branches are taken again depends on counters, too, so a specialisation decides it itself.
"""

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from ipu_dynamo.errors import IpuError
from ipu_dynamo.program.fused import Hyperparameters


class Specialisation(Protocol):
    """A form of a step that runs for some hyperparameters."""

    @property
    def fits(self) -> Callable[[Hyperparameters], bool] | None:
        """Whether the next step may run it, with these hyperparameters; None: each step may."""


S = TypeVar("S", bound=Specialisation)


class Specialisations(Generic[S]):
    """The specialisations of a step that were made so far.

    Invariant: an error or an interrupt at any point leaves the specialisations unchanged, or adds
    one. Each of them is complete. One thread at a time chooses.

    Args:
        make: makes one for hyperparameters that no other one fits.
        known: specialisations that exist already. A step without another choice runs the first one.
        most: the largest number kept. A further one replaces the oldest, which is made again if a
            step needs it. None: all are kept, and `make` refuses to make too many.
    """

    def __init__(
        self,
        make: Callable[[Hyperparameters], S],
        known: Iterable[S] = (),
        *,
        most: int | None = None,
    ) -> None:
        self._make, self._most = make, most
        # The last choice, and all in the order of their making. They are one tuple, so that an
        # interrupt comes before a change or after it.
        every = tuple(known)
        self._state: tuple[S | None, tuple[S, ...]] = (every[0] if every else None), every

    @property
    def all(self) -> tuple[S, ...]:
        """All of them, in the order in which they were made."""
        return self._state[1]

    @property
    def current(self) -> S:
        """The one that was chosen last, or the first one."""
        assert self._state[0] is not None, "nothing is chosen yet"
        return self._state[0]

    def choose(self, hyperparameters: Hyperparameters) -> S:
        """Choose the one for these hyperparameters. It is made if none fits.

        Raises:
            IpuError: the new one does not fit; it is not kept. `make` may raise other errors.
        """
        current, every = self._state
        if current is not None and (current.fits is None or current.fits(hyperparameters)):
            return current
        for other in every:
            if other is not current and (other.fits is None or other.fits(hyperparameters)):
                self._state = other, every
                return other
        made = self._make(hyperparameters)
        if made.fits is not None and not made.fits(hyperparameters):
            raise IpuError("a step that was made for some hyperparameters does not fit them")
        kept = every if self._most is None else every[max(0, len(every) + 1 - self._most) :]
        self._state = made, (*kept, made)
        return made
