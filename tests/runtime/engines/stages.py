"""Make the callable of a function that no program calls."""

from ipu_dynamo import Options
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.pipeline import recipe_of
from ipu_dynamo.program import Function
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.engines.stage_key import keyed


def stage_of(function: Function, engine: Engine) -> Stage:
    """What `engine` runs for a function."""
    (stage,) = engine.compile([keyed(recipe_of(function, Options(), Machine(engine.name)))])
    return stage
