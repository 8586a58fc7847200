"""Hold an engine back, as another process would that still compiles."""

from threading import Event

from ipu_dynamo.runtime.engines.engines import EagerEngine
from ipu_dynamo.runtime.engines.pending_code import EngineFailed, OnlyHere
from ipu_dynamo.whole_step import lowering


class Held:
    """The functions that another process compiles, until the test lets it end."""

    def __init__(self, engine, keys):
        self.keys, self._engine, self.stopped = keys, engine, False

    def ready(self):
        if self._engine.failure is not None:
            raise self._engine.failure
        if self._engine.let_go.is_set():
            self._engine.kept |= self.keys
        return self._engine.let_go.is_set()

    def wait(self):
        self._engine.let_go.wait(60)

    def stop(self):
        self.stopped = True


class HeldEngine(EagerEngine):
    """An engine for which host passes decide as for Inductor, and that runs operators.

    Args:
        only_here: why nothing but this process can compile; empty: others can.

    Attributes:
        let_go: the other process has compiled what it was asked.
        kept: keys of the code that is there.
        failure: of the other process.
        asked: how often it was asked.
    """

    name = "inductor"

    def __init__(self, only_here=""):
        super().__init__()
        self.let_go, self.kept, self.failure = Event(), set(), None
        self.only_here, self.asked = only_here, 0

    def begin(self, recipes):
        if self.only_here:
            raise OnlyHere(self.only_here)
        keys = {part.key for recipe in recipes for part in recipe.compiled_parts} - self.kept
        self.asked += bool(keys)
        return Held(self, frozenset(keys)) if keys else None

    def fail(self, words):
        self.failure = EngineFailed(words)
        self.let_go.set()


def use(monkeypatch, engine):
    """Let whole steps have this engine where they would have Inductor; returns it."""
    make = lowering.make_engine

    def made(name, check="auto"):
        return make(name, check) if name == "eager" else engine

    monkeypatch.setattr(lowering, "make_engine", made)
    return engine
