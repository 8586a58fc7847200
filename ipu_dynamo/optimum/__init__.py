"""Take the configuration of Hugging Face programs for IPUs, and place their models by it.

It stands on the core; only `to_options.py` knows poptorch, and imports it when it is called.
transformers and huggingface_hub are imported by nothing here but when a user names the Hub.
"""

try:
    import typeguard as _typeguard  # noqa: F401
except ImportError as error:
    raise ImportError(
        'ipu_dynamo.optimum needs typeguard: pip install "ipu_dynamo[optimum]"'
    ) from error

from ipu_dynamo.optimum.config import IPUConfig as IPUConfig
from ipu_dynamo.optimum.errors import IncompatibleIPUConfigError as IncompatibleIPUConfigError
from ipu_dynamo.optimum.files import IPU_CONFIG_NAME as IPU_CONFIG_NAME
