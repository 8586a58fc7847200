"""Compute CRC-32C as TensorFlow's files have it: masked, so that sums of sums differ.

Source: RFC 3720, B.4; tensorflow/core/lib/hash/crc32c.h for the mask.
"""

import logging
from collections.abc import Callable
from functools import cache

_POLYNOMIAL = 0x82F63B78
_DELTA = 0xA282EAD8
_log = logging.getLogger(__name__)


@cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


def masked_crc(content: bytes | memoryview) -> int:
    """The sum of bytes, as files have it; slow where google-crc32c is not installed."""
    crc = (fast_crc() or _slow_crc)(content)
    return ((crc >> 15 | crc << 17) + _DELTA) & 0xFFFFFFFF


@cache
def fast_crc() -> Callable[[bytes | memoryview], int] | None:
    """The function of google-crc32c, if it is installed."""
    try:
        import google_crc32c
    except ImportError:
        _log.warning(
            "the sums of variables are not checked: google-crc32c, of the extra saved-model, "
            "is not installed"
        )
        return None
    return lambda content: int(google_crc32c.value(bytes(content)))


def _slow_crc(content: bytes | memoryview) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
