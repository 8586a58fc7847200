"""The numbers of the check; a change of one needs another VERSION.

There are three units. `eps` is one in the last place of a result's dtype. M is the largest finite
reference of a tensor. N is the largest difference by moved roundings.
"""

import torch

VERSION = 2  # of the check, in the key of every outcome
RELATIVE = 8  # eps of each element
OF_LARGEST = 4  # eps of M
OF_MOVED = 4  # times N; also of elements that change in being finite, and of integers
OF_TERMS = 1  # eps of the sum of the sizes of its terms, by which a moved run moves a sum
ONE_BY_ONE = 4096  # terms of a sum that a moved run adds one after the other, as Inductor does
MOVED_RUNS = 4  # at first
MORE_MOVED_RUNS = 16  # before a failure counts
OPEN_CALLS = 8  # until a result with uniform values counts
SHARP = {torch.float32: 4000.0, torch.float64: 4000.0}  # 4 N is at most M through this
SHARP_HALF = 4.0  # of halves
MEMORY_SHARE = 0.25  # of the computer's memory that a check may take
