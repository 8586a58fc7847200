"""Name the costs that decide between two ways where nothing was measured.

Figures are round ones of server processors; a decision needs no more than their size. Limits of
passes above the host are theirs, as programs are the same on every machine.
"""

# --- Fused steps --------------------------------------------------------------------------------

# Measured with networks of two to four layers, on one thread of an AVX-512 server.
CALLING_AN_UPDATE = 4e-5  # seconds: numbers, launch, the beginning and the commit of a step
CALLING_A_PARAMETER = 5e-7  # seconds more for each parameter of an update
CALLING_A_TRACED_FUNCTION = 1e-5  # seconds: of an update that is traced, one for each parameter
STORES_OF_A_GRADIENT = 2  # passes over its memory: written to its accumulator, read by the update
COPIES_HOME = 2  # passes over the tensors that a fused step has changed, at the end of a call
UPDATE_BYTES_PER_SECOND = 2e10  # of such passes
# A fused step writes states to new memory, which takes longer than in place, as pages fault. For
# weights this is part of the passes above.
NEW_STATES_BYTES_PER_SECOND = 1e10
# Passes over a small parameter that is updated in a row with others. The gradient is copied into
# the row; the parameter is copied into it and back. Each copy reads and writes.
COPIES_INTO_A_ROW = 6
COMPILING_AN_UPDATE = 0.2  # seconds, for each parameter that a fused step updates
STEPS_OF_A_TRAINING = 100_000  # that share the time of compiling
MOST_COPIES = 1 << 28  # bytes of weights and states that a fused step may hold twice

# --- Threads and deferred accumulation ----------------------------------------------------------

WORTH_A_WORKER = 2e-4  # seconds of a stage's call, from which handing it over costs little
# Seconds of a micro-batch, from which deferring its gradients is worth a thread. The thread is
# started for one step.
WORTH_DEFERRING = 2e-3
# The share of a micro-batch's time that adding its gradients may take: without threads, matmuls add
# them at no cost. A language model with a share of 0.13 took 1.14 times as long in parallel on two
# cores.
SHARE_OF_ADDING = 0.05
PASSES_OF_ADDING = 3  # over the memory of a gradient, when it is kept and added later

# --- Pipelines ----------------------------------------------------------------------------------

# The share of the installed memory for forward values, of all stages and replicas, that an IPU
# would compute again. Weights, gradients, states and other programs need memory, too.
SHARE_OF_KEPT_VALUES = 0.25

# --- Ranks --------------------------------------------------------------------------------------

# --- Matmuls and convolutions -------------------------------------------------------------------

WORTH_CHANGING = 1.05  # PyTorch's own code stays where another way gains less
WORTH_MEMORY = 1.02  # a packed weight takes as much memory as the weight
LARGE_CONVOLUTION = 50_000_000  # operations (a multiplication and an addition are two)
# Operations of a matmul, below which a step is repeated without Python, by matmuls of our own.
SMALL_MATMUL = 8_000_000
MOST_PATCHES = 1_000_000  # elements of the patches, which take memory while the matmul runs
MOST_PLACES = 25  # of a kernel, each with operators of its own in the gradient of the image
ROWS_OF_A_BLOCK = 128  # at least, of a loss: with fewer, matmuls wait for the weight from memory
FEWEST_BLOCKS = 4  # of rows of a loss, unless fewer were asked for

# --- Compilers ----------------------------------------------------------------------------------

# Reading the headers takes as long as compiling 20 kernels. Cutting longer files lets other cores
# work, too, and bounds a compiler's memory.
KERNELS_IN_A_UNIT = 64
# A further process takes 4 s of a core to import PyTorch and Inductor. With so much lowering for
# each of them, all processes take at most 1.15 of one's processor time: see docs/compiled_code.md.
LOWERING_AN_OPERATOR = 0.016  # seconds
WORTH_A_PROCESS = 16.0  # seconds of lowering
