"""Number the prefixes of label sequences: the same prefix has the same number whenever it is met.

All prefixes of a call are looked up side by side, in a hash table with open addressing.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

NO_PREFIX, UNUSED = 0, 1  # the parent of an empty prefix, and the prefix in a free place
_LARGEST_FIRST = 1 << 19  # prefixes that there is room for at once: 48 MiB
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio: it spreads close keys


class Prefixes:
    """A tree of prefixes.

    Args:
        batch: how many sequences there are; each has an empty prefix of its own.
        classes: labels are smaller.
        expected: how many prefixes there may be in all; if there are more, room is made for them.

    Attributes:
        empty: the empty prefixes.
        parents, labels, lengths: of each prefix, the prefix that it extends by which label, and how
            long it is.
    """

    def __init__(self, batch: int, classes: int, expected: int) -> None:
        self._classes = classes
        self.empty = torch.arange(2, 2 + batch)
        self._count = 2 + batch
        # Memory that is never touched costs nothing, and a table that grows is written anew.
        room = max(self._count, min(expected, _LARGEST_FIRST))
        self.parents = torch.empty(room, dtype=torch.int64)
        self.labels = torch.empty(room, dtype=torch.int64)
        self.lengths = torch.empty(room, dtype=torch.int64)
        self.parents[: self._count] = NO_PREFIX
        self.labels[: self._count] = -1
        self.lengths[: self._count] = 0
        self._places = torch.full((room,), -1)
        size = 1 << (2 * room).bit_length()
        self._keys = torch.full((size,), -1)
        self._numbers = torch.empty(size, dtype=torch.int64)

    def extended(self, prefixes: Tensor, labels: Tensor) -> Tensor:
        """The numbers of different prefixes with one more label; all one-dimensional."""
        self._make_room(len(prefixes))
        slots, added = self._slots(prefixes * self._classes + labels)
        new = slice(self._count, self._count + len(added))
        self._count = new.stop
        self._numbers[slots.index_select(0, added)] = torch.arange(new.start, new.stop)
        parents = prefixes.index_select(0, added)
        self.parents[new], self.labels[new] = parents, labels.index_select(0, added)
        self.lengths[new] = self.lengths.index_select(0, parents) + 1
        return self._numbers.index_select(0, slots)

    def places_of_parents(self, prefixes: Tensor) -> Tensor:
        """Where in its row, `[batch, beams]`, the parent of each prefix is; -1: not there."""
        self._places[prefixes] = torch.arange(prefixes.shape[1]).expand_as(prefixes)
        self._places[UNUSED] = -1
        found = self._places.take(self.parents.take(prefixes))
        self._places[prefixes] = -1
        return found

    def _slots(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Where keys, which differ from each other, are in the table, and which ones are new."""
        last = len(self._keys) - 1
        spread = keys * _MULTIPLIER
        slots, steps = (spread >> 20) & last, (spread >> 40) | 1
        new = torch.zeros_like(keys, dtype=torch.bool)
        waiting = torch.arange(len(keys))
        while len(waiting):
            here, wanted = slots.index_select(0, waiting), keys.index_select(0, waiting)
            known = self._keys.index_select(0, here)
            free = known < 0
            # Of several keys for a free slot one gets it.
            self._keys[here.masked_select(free)] = wanted.masked_select(free)
            mine = self._keys.index_select(0, here) == wanted
            new[waiting.masked_select(free & mine)] = True
            waiting = waiting.masked_select(~mine)
            onward = here.masked_select(~mine) + steps.index_select(0, waiting)
            slots[waiting] = onward & last
        return slots, new.nonzero().squeeze(1)

    def _make_room(self, more: int) -> None:
        """Keep half of the table free, and have memory for further prefixes."""
        needed = self._count + more
        if needed * 2 > (size := len(self._keys)):
            while needed * 2 > size:
                size *= 2
            known = self._keys >= 0
            keys, numbers = self._keys[known], self._numbers[known]
            self._keys, self._numbers = (
                torch.full((size,), -1),
                torch.zeros(size, dtype=torch.int64),
            )
            self._numbers[self._slots(keys)[0]] = numbers
        if (missing := needed - len(self.parents)) > 0:
            missing = max(missing, len(self.parents))
            self.parents = F.pad(self.parents, (0, missing))
            self.labels = F.pad(self.labels, (0, missing), value=-1)
            self.lengths = F.pad(self.lengths, (0, missing))
            self._places = F.pad(self._places, (0, missing), value=-1)
