"""Name the costs that decide between two ways where nothing was measured.

Figures are round ones of server processors; a decision needs no more than their size.
"""

LARGE_UPDATE = 100_000  # elements; they take some tenths of a millisecond

# --- Threads and deferred accumulation ----------------------------------------------------------

WORTH_A_WORKER = 2e-4  # seconds of a stage's call, from which handing it over costs little
# Seconds of a micro-batch, from which deferring its gradients is worth a thread, which lives for
# one step and is started for it.
WORTH_DEFERRING = 2e-3
# Of a micro-batch's time, which adding its gradients may take: in turn, matmuls add themselves. A
# language model with a share of 0.13 took 1.14 times as long side by side on two cores.
SHARE_OF_ADDING = 0.05
PASSES_OF_ADDING = 3  # over the memory of a gradient, when it is kept and added later
