"""Let no error of the core out of a call, and say what PopTorch programs match on."""

from collections.abc import Iterator
from contextlib import contextmanager

from ipu_dynamo.capture.private.tracing import DATA_DEPENDENT
from ipu_dynamo.errors import IpuError
from ipu_dynamo.passes.joint.scale_loss import NothingToWatch
from ipu_dynamo.passes.traced.block_places import BlockError
from ipu_dynamo.passes.traced.placement import PipelineSizeError
from ipu_dynamo.passes.traced.tag_convolution_groups import EmptyGroup, NestedGroups
from poptorch.checks import check_ipus
from poptorch.errors import Error, wrapped
from poptorch.options import Options


@contextmanager
def core_errors(context: str, options: Options) -> Iterator[None]:
    """Raise what PopTorch raises where the core raises an error of its own.

    Args:
        context: what is being done, such as "compiling Net".
        options: of the executor that does it.
    """
    with wrapped(context):
        try:
            yield
        except BlockError as error:
            raise AssertionError(str(error)) from error
        except PipelineSizeError as error:
            check_ipus(error.num_ipus, options)
            raise Error(_pipeline_size(error)) from error
        except NothingToWatch as error:
            problem = "No tracked gradient tensors of type fp16 were found."
            raise Error(f"Automatic loss scaling: {problem}\n{error}") from error
        except NestedGroups as error:
            raise Error(f"Nested poptorch.MultiConv is not supported.\n{error}") from error
        except EmptyGroup as error:
            raise Error(f"Unexpected end_multi_conv: {error}") from error
        except IpuError as error:
            if isinstance(error.__cause__, DATA_DEPENDENT):
                raise Error(
                    "aten::item is only supported in eager mode, and a trace has no values: "
                    f"{error}\nPopTorch's control flow on tensors, poptorch.cond and "
                    "poptorch.for_loop, does not exist here yet"
                ) from error
            raise


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
