"""Show what became of a model: one object, `Inspection`, for every way to compile one.

Each kind of compiled object gives its own by a method `__ipu_inspect__`; this folder knows none of
them. It only looks: nothing here compiles, runs a step, or draws a number.
"""
