"""Import the databases of PyTorch's tests; keep the hypothesis profile that this would replace."""

from hypothesis import settings

_profile = settings.get_current_profile_name()
from torch.testing._internal import common_methods_invocations as database  # noqa: E402
from torch.testing._internal import common_modules as modules  # noqa: E402
from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.opinfo.core import SampleInput  # noqa: E402

settings.load_profile(_profile)
# Samples look through the whole stack for a test of unittest, to note there which sample is tried.
common_utils.extract_test_fn = lambda: None

__all__ = ["SampleInput", "database", "modules"]
