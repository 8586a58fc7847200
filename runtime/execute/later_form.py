"""Wait for the compiled functions of a form of a step, while another form runs the steps."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.program import HostProgram
from ipu_dynamo.program.fused import Hyperparameters, rules_of, zeros_of
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.check.checks import Checks
from ipu_dynamo.runtime.engines.pending_code import EngineFailed, OnlyHere, PendingCode
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.engines.stage_key import keyed
from ipu_dynamo.runtime.execute.bound_form import BoundForm, Surroundings, bind_form
from ipu_dynamo.runtime.execute.step_form import FormInputs


class LaterForm:
    """A form whose functions another process compiles.

    Invariant: it has read and written no variable, until it is bound.

    Args:
        inputs: of the form.
        common: with the form that runs the steps.
        hyperparameters: probable ones; functions are specialised for these.

    Raises:
        OnlyHere: another process cannot compile its functions.
    """

    def __init__(
        self, inputs: FormInputs, common: Surroundings, hyperparameters: Hyperparameters
    ) -> None:
        self._inputs, self._common, self._hyperparameters = inputs, common, hyperparameters
        self._process, self._asked = os.getpid(), set[str]()  # who asks, for which keys of code
        self._pending: PendingCode | None = None
        self._ask()

    @property
    def waits(self) -> bool:
        """Whether functions are still to be compiled, as far as is known."""
        return self._pending is not None

    def wait(self) -> None:
        """Wait until another process has compiled the functions, or cannot."""
        if self._pending is not None and self._process == os.getpid():
            self._pending.wait()
        with compile_lock():  # `bound` does not wait for it
            pass

    def stop(self) -> None:
        """End the process that compiles."""
        if self._pending is not None and self._process == os.getpid():
            self._pending.stop()

    def bound(
        self, hyperparameters: Hyperparameters, others: Sequence[HostProgram]
    ) -> BoundForm | None:
        """Bind the form, if its functions are compiled and no other thread compiles.

        Args:
            hyperparameters: of the next steps; empty: they are not known.
            others: with the updates that were traced meanwhile.

        Raises:
            EngineFailed: its functions cannot be compiled.
            IpuError: a pass refuses these hyperparameters.
        """
        lock = compile_lock()
        if not lock.acquire(blocking=False):  # its holder may wait for the end of this call
            return None
        try:
            with torch.inference_mode(False):  # the new form outlives the call
                return self._bound(hyperparameters, others)
        finally:
            lock.release()

    def _bound(
        self, hyperparameters: Hyperparameters, others: Sequence[HostProgram]
    ) -> BoundForm | None:
        own, elsewhere = self._process == os.getpid(), True
        try:
            if own and self._pending is not None and not self._pending.ready():
                return None
        except OnlyHere:
            elsewhere = False
        # a forked process begins anew: the one that compiles works for another process
        self._specialise(hyperparameters or self._hyperparameters, others)
        try:
            self._pending = None
            if elsewhere:
                with suppress(OnlyHere):
                    self._ask()
            if self._pending is not None:
                return None
            return bind_form(self._inputs, self._common, self._hyperparameters)
        except Exception as error:
            raise EngineFailed(str(error)) from error

    def _specialise(self, hyperparameters: Hyperparameters, others: Sequence[HostProgram]) -> None:
        """Become the form for other hyperparameters, and for further traced updates."""
        host, fuse_again = self._inputs.host, self._inputs.fuse_again
        if host.fused is not None:
            zeros = zeros_of(rules_of(host.inlined), hyperparameters)
            if fuse_again is not None and zeros != host.fused.zeros:
                host = fuse_again(hyperparameters)
        self._inputs = replace(self._inputs, host=host, others=others)
        self._hyperparameters = hyperparameters

    def _ask(self) -> None:
        """Let another process compile the functions whose code is not there.

        Raises:
            EngineFailed: it has compiled one of them already, and could not keep its code.
            OnlyHere: it cannot compile them.
        """
        if self._process != os.getpid():  # others asked before the fork
            self._process, self._asked = os.getpid(), set()
        self._pending = self._inputs.engine.begin(self._recipes())
        keys = self._pending.keys if self._pending is not None else frozenset[str]()
        if self._pending is not None and keys & self._asked:
            self._pending.stop()
            raise EngineFailed("compiled code was made, and could not be kept")
        self._asked |= keys

    def _recipes(self) -> list[FunctionRecipe]:
        """Of all functions that the form compiles."""
        host = self._inputs.host
        if host.fused is not None or not host.program.update_functions:
            return [keyed(recipe) for recipe in host.recipes.values()]
        noting = _NotingEngine()
        bind_form(replace(self._inputs, engine=noting), self._common, ())
        return noting.recipes


class _NotingEngine:
    """Notes recipes, and compiles nothing: its stages cannot be called."""

    name = "none"

    def __init__(self) -> None:
        self.compiled, self.checks = 0, Checks("off")
        self.recipes: list[FunctionRecipe] = []

    def compile(self, recipes: Sequence[FunctionRecipe]) -> list[Stage]:
        self.recipes += recipes
        return [_not_compiled] * len(recipes)

    def begin(self, recipes: Sequence[FunctionRecipe]) -> PendingCode | None:
        return None


def _not_compiled(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    raise AssertionError("the function is not compiled")
