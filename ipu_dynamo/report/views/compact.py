"""Write texts once and numbers in few characters, as the script of a report reads them."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

Json = Any  # what `json.dumps` takes
Column = tuple[str, str, str]  # key, heading, kind: text, count, cycles, bytes, flops or percent


class Strings:
    """Texts, each once; a text is its position in `texts`."""

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """The position of a text."""
        return self._positions.setdefault(text, len(self._positions))

    @property
    def texts(self) -> list[str]:
        """All texts, by position."""
        return list(self._positions)


def pack(numbers: Iterable[int]) -> str:
    """Integers in base64: of each the difference to the one before, equal differences once.

    A varint is 4 times a difference's size, with 2 for a negative one, and 1 for one that repeats:
    how often more is the next varint. `unpack` in `assets/state.js` is the inverse.
    """
    packed, last = bytearray(), 0
    changes = []
    for number in numbers:
        changes.append(number - last)
        last = number
    for change, equal in groupby(changes):
        more = sum(1 for _ in equal) - 1
        size = 4 * abs(change) + 2 * (change < 0)
        if more > 1:
            _add_varint(packed, size + 1)
            _add_varint(packed, more)
        else:
            for _ in range(more + 1):
                _add_varint(packed, size)
    return b64encode(packed).decode("ascii")


def _add_varint(packed: bytearray, number: int) -> None:
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)


def pack_repeated(numbers: Sequence[int]) -> dict[str, str]:
    """Integers of which many are equal: the different ones, and the position of each among them."""
    positions = {number: at for at, number in enumerate(sorted(set(numbers)))}
    return {"values": pack(positions), "at": pack(positions[number] for number in numbers)}


def pack_columns(columns: Mapping[str, Iterable[int]]) -> dict[str, str]:
    """Several lists of integers, each packed."""
    return {name: pack(numbers) for name, numbers in columns.items()}


def table(
    strings: Strings, caption: str, columns: Sequence[Column], rows: Iterable[Sequence[Any]]
) -> dict[str, Json]:
    """A table whose rows stand in the page: texts as positions, numbers as they are."""
    kinds = [kind for _, _, kind in columns]
    return {
        "caption": caption,
        "columns": [{"key": k, "label": label, "kind": kind} for k, label, kind in columns],
        "rows": [
            [strings(v) if kind == "text" else v for v, kind in zip(row, kinds, strict=True)]
            for row in rows
        ],
    }


def stem_and_number(name: str) -> tuple[str, int]:
    """A name without the number at its end, and that number; -1: it has none.

    Names of values differ in their numbers mostly, so that stems are few.
    """
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    if not digits.isascii() or str(int(digits or "0")) != digits or len(digits) > 9:
        return name, -1
    return stem, int(digits)
