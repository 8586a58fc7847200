"""Hold the constants of estimated costs, each with its source."""

NODE_CYCLES = 500
"""Of every operator. Source: IPU TensorFlow Addons, the cycles of a node that a profile lacks."""

FLOPS_PER_CYCLE = {
    "float32": 47_104,
    "float16": 94_208,
    "float16, half partials": 188_416,
}
"""Source: Mk2 IPU, 1,472 tiles with 32, 64 and 128 floating-point operations per cycle."""

BYTES_PER_CYCLE = 35_328
"""Source: Mk2 IPU, 1,472 tiles with 24 bytes per cycle."""

CYCLES_PER_SECOND = 1_325_000_000
"""Source: the clock of the Mk2 IPU, 1.325 GHz."""

MEMORY_PER_IPU = 940_572_672
"""Bytes. Source: Mk2 IPU, 1,472 tiles with 624 KiB."""

RESERVE_PERCENT = 17
"""Of the memory of one IPU; so much stays free over all. Source: IPU TensorFlow Addons, 160 MB."""
