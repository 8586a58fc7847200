"""Hold the figures that decide how functions are compiled, to decide alike elsewhere.

Measured times decide which library computes a matmul, and so the last bits of results. A saved
program includes the figures: so the same machine decides alike in another process, or with another
cache folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ipu_dynamo.tune.convolution_shape import ConvolutionShape
from ipu_dynamo.tune.convolution_times import convolution_times
from ipu_dynamo.tune.matmul_choice import Library, MatmulChoice
from ipu_dynamo.tune.matmul_classes import MatmulClass
from ipu_dynamo.tune.matmul_times import Times, Way, matmul_times


@dataclass(frozen=True)
class Figures:
    """The figures by which functions are compiled.

    Args:
        library: for all matmuls; None: the faster one of each class.
        matmuls: seconds of a matmul of each class that was asked for; others are measured. None: no
            matmul was asked for, or nothing is known, and PyTorch computes them.
        convolutions: seconds of convolutions in each way; others are measured.
    """

    library: Library | None
    matmuls: Times | None = None
    convolutions: Mapping[ConvolutionShape, Mapping[str, float]] = field(default_factory=dict)

    def of_convolution(self, shape: ConvolutionShape) -> Mapping[str, float] | None:
        """Seconds of a convolution in each way; None where nothing is known."""
        return self.convolutions.get(shape) or convolution_times(shape)

    def of_matmul(self, matmul: MatmulClass) -> Mapping[Way, float] | None:
        """Seconds of a matmul of a class in each way; None where nothing is known."""
        return None if self.matmuls is None else self.matmuls.get(matmul) or matmul_times(matmul)

    def choice(self) -> MatmulChoice:
        """Which library computes which matmuls."""
        return MatmulChoice(self.library, self.of_matmul)
