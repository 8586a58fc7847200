"""Turn errors of the core into those of PopTorch, with the texts that programs match on."""

from collections.abc import Iterator
from contextlib import contextmanager

from ipu_dynamo.capture.private.tracing import DATA_DEPENDENT, shape_of_values
from ipu_dynamo.capture.trace import UnknownClasses
from ipu_dynamo.errors import IpuError
from ipu_dynamo.passes.joint.scale_loss import NothingToWatch
from ipu_dynamo.passes.traced.overlap_io import OverlapError, OverlapRule
from ipu_dynamo.passes.traced.stages.block_places import BlockError
from ipu_dynamo.passes.traced.stages.placement import PipelineSizeError
from ipu_dynamo.passes.traced.tag_convolution_groups import EmptyGroup, NestedGroups
from poptorch.checks import check_ipus
from poptorch.errors import Error, led_to_guide, wrapped
from poptorch.options import Options


@contextmanager
def core_errors(context: str, options: Options) -> Iterator[None]:
    """Raise PopTorch's error in place of an error of the core.

    Args:
        context: the running task, such as "compiling Net".
        options: of the executor that does it.
    """
    with wrapped(context):
        try:
            yield
        except BlockError as error:
            raise led_to_guide(AssertionError(str(error)), error) from error
        except PipelineSizeError as error:
            check_ipus(error.num_ipus, options)
            raise Error(_pipeline_size(error), id=error.id) from error
        except NothingToWatch as error:
            problem = "No tracked gradient tensors of type fp16 were found."
            raise Error(f"Automatic loss scaling: {problem}\n{error}", id=error.id) from error
        except OverlapError as error:
            raise Error(
                f"{_OVERLAP[error.rule].format(error.name)}\n{error}", id=error.id
            ) from error
        except NestedGroups as error:
            raise Error(
                f"Nested poptorch.MultiConv is not supported.\n{error}", id=error.id
            ) from error
        except EmptyGroup as error:
            raise Error(f"Unexpected end_multi_conv: {error}", id=error.id) from error
        except UnknownClasses as error:
            problem = "OneHot num classes must be specified and must be constant."
            raise Error(f"{problem}\n{error}", id=error.id) from error
        except IpuError as error:
            if shape_of_values(error.__cause__):
                raise  # wrapped, in its own words
            if isinstance(error.__cause__, DATA_DEPENDENT):
                raise Error(
                    "aten::item is only supported in eager mode, and a trace has no values: "
                    f"{error}\nControl flow that depends on tensors is poptorch.cond and "
                    "poptorch.for_loop",
                    id=error.id,
                ) from error
            raise


_OVERLAP: dict[OverlapRule, str] = {
    "only reader": "poptorch.set_overlap_for_input must be the only op applied to an input. This "
    "is not the case for input {} to the model.",
    "an input": "poptorch.set_overlap_for_input applied on a node which is not a tensor input to "
    "the model.",
    "an output": "poptorch.set_overlap_for_output applied on a node which is not a tensor output "
    "to the model.",
    "returned once": "poptorch.set_overlap_for_output cannot be used with a tensor that is "
    "returned twice. Please check all returned tensors including those nested in tuples/lists.",
    "strategy": "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using "
    "only one IPU, please switch to poptorch.ShardedExecution.",
    "tiles": "No IO tiles allocated. You must allocate at least 32 IO tiles using "
    "poptorch.Options().TensorLocations.numIOTiles.",
    "output mode": "Unsupported output mode for overlapped IO. Please switch output mode to "
    "poptorch.OutputMode.All or poptorch.OutputMode.Sum.",
}


def _pipeline_size(error: PipelineSizeError) -> str:
    if not error.training:
        return (
            "poptorch.Options().deviceIterations must be greater than or equal to the number of "
            f"pipeline stages ({error.stages}) when using PopTorch.PipelinedExecution."
        )
    return (
        "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the "
        f"number of pipeline stages ({error.required}) when using poptorch.PipelinedExecution. "
        f"Please note that a model with {error.stages} pipeline stages in PopTorch will have an "
        f"additional {error.stages - 1} stages when training."
    )
