"""Say of a name of TensorFlow's `ipu` that it is not offered here."""

from collections.abc import Callable
from typing import Any

# names of TensorFlow's `ipu` in published Keras programs, and the line to write today
TODAY = {
    "keras.PipelineModel": "keras.Model(...) in strategy.scope(), with PipelineStage(n) blocks",
    "keras.PipelineSequential": "keras.Sequential([...]), then "
    "model.set_pipeline_stage_assignment([0, 1, ...])",
    "keras.PipelinedModel": "keras.Model(...) in strategy.scope(), with PipelineStage(n) blocks",
    "keras.SequentialPipelineModel": "keras.Sequential([...]), then "
    "model.set_pipeline_stage_assignment([0, 1, ...])",
    "keras.PipelineStage": "from ipu_dynamo.keras import PipelineStage",
    "keras.Model": "keras.Model(...) in strategy.scope()",
    "keras.Sequential": "keras.Sequential([...]) in strategy.scope()",
    "utils.create_ipu_config": "config = ipu.config.IPUConfig()",
    "utils.auto_select_ipus": "config.auto_select_ipus = n",
    "utils.select_ipus": "config.auto_select_ipus = n",
    "utils.set_ipu_model_options": "leave it out: there is no hardware to choose",
    "utils.set_optimization_options": "leave it out: the compiler chooses",
    "ipu_infeed_queue": "model.fit(x, y): fit reads data ahead",
    "ipu_outfeed_queue": "model.fit(x, y): logs come to callbacks",
    "loops": "model.fit(..., steps_per_epoch=n), and compile(steps_per_execution=n)",
    "ipu_compiler": "model.fit, evaluate and predict in strategy.scope()",
    "scopes": "with PipelineStage(n):",
}


def not_offered(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module of the namespace."""

    def refuse(name: str) -> Any:
        if name.startswith("__"):  # Python asks for these itself
            raise AttributeError(name)
        path = f"{module}.{name}".removeprefix("ipu.")
        if path in TODAY:
            raise AttributeError(f"{module}.{name} is not offered here. Write today: {TODAY[path]}")
        raise AttributeError(
            f"{module}.{name} is not offered here: ipu_dynamo.keras.ipu has what Keras programs "
            "use of ipu, in config, utils, ipu_strategy, ops.pipelining_ops, "
            "gradient_accumulation and serving"
        )

    return refuse
