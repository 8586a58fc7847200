"""Name the numbers of IEEE 754 float16 that rounding a float32 to it needs."""

DROPPED_BITS = 13  # of a float32 fraction, for which a half has no room
SMALLEST_NORMAL = 2.0**-14  # of the halves with 11 digits; below, they are multiples of STEP
STEP = 2.0**-24
