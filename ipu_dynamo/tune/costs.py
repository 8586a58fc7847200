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
COPIES_HOME = 2  # passes over what a fused step has changed, at the end of a call
UPDATE_BYTES_PER_SECOND = 2e10  # of such passes
# States are written to new memory in a fused step, which takes longer than in place: faults of
# pages. Of weights the passes above have it.
NEW_STATES_BYTES_PER_SECOND = 1e10
# Passes over a small parameter that is updated in a row with others: its gradient is read and
# written into the row, the parameter read and written on the way in and on the way back.
COPIES_INTO_A_ROW = 6
COMPILING_AN_UPDATE = 0.2  # seconds, for each parameter that a fused step updates
STEPS_OF_A_TRAINING = 100_000  # that what compiling takes is shared by
MOST_COPIES = 1 << 28  # bytes of weights and states that a fused step may hold twice

# --- Threads and deferred accumulation ----------------------------------------------------------

WORTH_A_WORKER = 2e-4  # seconds of a stage's call, from which handing it over costs little
# Seconds of a micro-batch, from which deferring its gradients is worth a thread, which lives for
# one step and is started for it.
WORTH_DEFERRING = 2e-3
# Of a micro-batch's time, which adding its gradients may take: in turn, matmuls add themselves. A
# language model with a share of 0.13 took 1.14 times as long side by side on two cores.
SHARE_OF_ADDING = 0.05
PASSES_OF_ADDING = 3  # over the memory of a gradient, when it is kept and added later

# --- Pipelines ----------------------------------------------------------------------------------

# Of the installed memory, which forward values of all stages and replicas may take that an IPU
# would compute again. Weights, gradients and states need some, and so do other programs.
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

# To read the headers takes as long as to compile 20 kernels; a file with more than these gives
# other cores something to do, and bounds a compiler's memory.
KERNELS_IN_A_UNIT = 64
# A further process takes 4 s of a core to import PyTorch and Inductor. With so much lowering for
# each of them, all processes take at most 1.15 of one's processor time: see docs/compiled_code.md.
LOWERING_AN_OPERATOR = 0.016  # seconds
WORTH_A_PROCESS = 16.0  # seconds of lowering
