"""Take the configuration of Hugging Face programs for IPUs, and place their models by it.

It is built on the core. Only `to_options.py` uses poptorch, and imports it when it is called.
transformers and huggingface_hub are imported only when a user names the Hub.
"""

try:
    import typeguard as _typeguard  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ipu_dynamo.optimum needs typeguard: run pip install '.[optimum]' in the checkout"
    ) from error

from ipu_dynamo.optimum.checkpoint import recomputation_checkpoint as recomputation_checkpoint
from ipu_dynamo.optimum.config import IPUConfig as IPUConfig
from ipu_dynamo.optimum.files.config_files import IPU_CONFIG_NAME as IPU_CONFIG_NAME
from ipu_dynamo.optimum.incompatible import IncompatibleIPUConfigError as IncompatibleIPUConfigError
from ipu_dynamo.optimum.layer_counts import get_layer_ipu as get_layer_ipu
from ipu_dynamo.optimum.layer_counts import (
    split_encoder_decoder_ipu_config as split_encoder_decoder_ipu_config,
)
from ipu_dynamo.optimum.pipelined import PipelineMixin as PipelineMixin
from ipu_dynamo.optimum.pipelined import register as register
from ipu_dynamo.optimum.pipelined import to_pipelined as to_pipelined
from ipu_dynamo.optimum.placement.layer_plans import plan_layers as plan_layers
from ipu_dynamo.optimum.placement.place_model import deparallelize as deparallelize
from ipu_dynamo.optimum.placement.place_model import parallelize as parallelize
from ipu_dynamo.optimum.serialized.serialized_embedding import (
    SerializedEmbedding as SerializedEmbedding,
)
from ipu_dynamo.optimum.serialized.serialized_linear import SerializedLinear as SerializedLinear
from ipu_dynamo.optimum.serialized.serialized_linear import SplitProjection as SplitProjection
