"""Convert in a process of its own that may be killed."""

import os
import warnings
from pathlib import Path

import torch

from ipu_dynamo.saved_model.conversion.convert import convert


def convert_all(source: Path, folder: Path) -> None:
    """Convert with an executable and stages, and with every file in `folder`."""
    torch.set_num_threads(1)
    os.environ["IPU_DYNAMO_ENGINE"] = "eager"
    warnings.simplefilter("ignore")
    convert(
        source,
        folder / "out",
        num_ipus=2,
        int64_to_int32_conversion=True,
        embedded_runtime_save_config={
            "embedded_runtime_exec_cachedir": str(folder / "exec"),
            "runtime_api_timeout_us": 5000,
        },
        pipeline_cfg={
            "converter": "manual",
            "manual_pipeline_config": [["left"], ["^(norm|split|right|mul|add|cat)"]],
            "device_info": [0, 1],
            "solution_dir": str(folder / "solution"),
            "profiling_root_dir": str(folder / "profile"),
        },
    )
