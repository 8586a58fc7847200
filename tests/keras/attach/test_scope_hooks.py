"""Check that a scope's hooks are there while it is open, in its thread, and gone after it."""

import threading

import keras
import pytest
import torch

from ipu_dynamo.keras import IPUStrategy, PipelineStage, current_strategy
from ipu_dynamo.keras.private import default_backend
from ipu_dynamo.keras.private.keras_private import Model, Node, Operation, Sequential

HOOKED = [
    (Model, "__new__"),
    (Operation, "__new__"),
    (Node, "__init__"),
    (Model, "from_config"),
    (Sequential, "from_config"),
    (default_backend.registry, default_backend.NAME),
]


def raw():
    """What stands in the place of each hook, by identity."""
    return [id(vars(owner)[name]) for owner, name in HOOKED]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = raw()
    yield
    assert raw() == before
    assert current_strategy() is None
    assert torch.compiler.get_default_backend() == "inductor"


def dense():
    return keras.layers.Dense(2)


def is_extended(model):
    return any(cls.__module__ == "ipu_dynamo.keras.extensions" for cls in type(model).__mro__)


def test_every_attribute_is_hooked_in_the_scope():
    before = raw()
    with IPUStrategy().scope():
        assert all(now != then for now, then in zip(raw(), before, strict=True))
        assert torch.compiler.get_default_backend() == "ipu"
        assert is_extended(keras.Sequential([dense()]))
    assert not is_extended(keras.Sequential([dense()]))


def test_twenty_nestings():
    strategy, before = IPUStrategy(), raw()
    inside = None
    scopes = []
    for _ in range(20):
        scope = strategy.scope()
        assert scope.__enter__() is strategy
        scopes.append(scope)
        inside = inside or raw()
        assert raw() == inside
    while scopes:
        assert raw() == inside
        assert current_strategy() is strategy
        scopes.pop().__exit__(None, None, None)
    assert raw() == before


def test_another_strategy_inside_is_refused():
    outer = IPUStrategy(2)
    with outer.scope():
        with (
            pytest.raises(RuntimeError, match=r"num_ipus=4.* inside that of .*num_ipus=2"),
            IPUStrategy(4).scope(),
        ):
            pass
        assert current_strategy() is outer


class Broken(keras.Model):
    def __init__(self):
        super().__init__()
        raise LookupError("in a constructor")


@pytest.mark.parametrize("kind", ["body", "constructor", "stage", "base"])
def test_an_exception_leaves_nothing(kind):
    def fail():
        if kind == "constructor":
            Broken()
        elif kind == "stage":
            with PipelineStage(1):
                Broken()
        elif kind == "base":
            raise KeyboardInterrupt
        raise LookupError("in the body")

    before = raw()
    with pytest.raises((LookupError, KeyboardInterrupt)), IPUStrategy().scope():
        fail()
    assert raw() == before
    with IPUStrategy().scope(), PipelineStage(0):  # no stage is left open
        pass


def test_an_exception_in_an_inner_scope_leaves_the_outer_one():
    strategy = IPUStrategy()
    with strategy.scope():
        inside = raw()
        with pytest.raises(LookupError), strategy.scope():
            raise LookupError
        assert raw() == inside
        assert is_extended(keras.Sequential([dense()]))


def test_another_thread_sees_nothing():
    seen = {}

    def look():
        seen["strategy"] = current_strategy()
        seen["backend"] = torch.compiler.get_default_backend()
        seen["model"] = keras.Sequential([dense()])
        config = keras.Sequential([dense()]).get_config()
        seen["loaded"] = keras.Sequential.from_config(config)
        try:
            with PipelineStage(0):
                pass
        except RuntimeError as error:
            seen["error"] = str(error)

    with IPUStrategy(2).scope(), PipelineStage(0):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        layer = dense()
    assert seen["strategy"] is None
    assert seen["backend"] == "inductor"
    assert not is_extended(seen["model"])
    assert not is_extended(seen["loaded"])
    assert "_ipu_dynamo_stage" in vars(layer)
    assert not any("_ipu_dynamo_stage" in vars(made) for made in seen["model"].layers)
    assert "outside of a strategy's scope" in seen["error"]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_scopes_of_two_threads_overlap(first_ends_first):
    before, problems = raw(), []
    entered, leave = threading.Event(), threading.Event()

    def hold():
        try:
            with IPUStrategy(4).scope():
                entered.set()
                assert leave.wait(20)
                assert current_strategy().num_ipus == 4
                assert is_extended(keras.Sequential([dense()]))
            assert not is_extended(keras.Sequential([dense()]))
        except BaseException as error:
            problems.append(error)
            entered.set()

    scope = IPUStrategy(2).scope()
    scope.__enter__()
    inside = raw()
    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(20)
    assert current_strategy().num_ipus == 2
    if first_ends_first:
        scope.__exit__(None, None, None)
        assert raw() == inside  # the other thread's scope needs them
        assert not is_extended(keras.Sequential([dense()]))
        assert torch.compiler.get_default_backend() == "inductor"
    leave.set()
    thread.join()
    if not first_ends_first:
        assert raw() == inside
        assert is_extended(keras.Sequential([dense()]))
        scope.__exit__(None, None, None)
    assert problems == []
    assert raw() == before


def test_without_extensions_only_the_default_backend_changes():
    with IPUStrategy(enable_keras_extensions=False).scope():
        assert torch.compiler.get_default_backend() == "ipu"
        assert not is_extended(keras.Sequential([dense()]))
        with PipelineStage(0):
            assert "_ipu_dynamo_stage" not in vars(dense())
