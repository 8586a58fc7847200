"""Check that one warning of Inductor is dropped, and others are not."""

import importlib
import inspect
import logging

from ipu_dynamo.runtime.engines import inductor_noise


def test_drops_the_warning_that_inductor_gives(caplog):
    inductor_noise.mute()
    inductor_noise.mute()
    text = "standalone_compile artifact generation failed, cannot save. "
    module = "torch._inductor.standalone_compile"
    assert text in inspect.getsource(importlib.import_module(module))
    logger = logging.getLogger(module)
    with caplog.at_level(logging.WARNING, logger=module):
        logger.warning(text)
        logger.warning("another one")
    assert [record.getMessage() for record in caplog.records] == ["another one"]
