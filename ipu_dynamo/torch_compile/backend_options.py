"""Hold the options of `torch.compile(model, backend="ipu", options=...)`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from ipu_dynamo.ops.private.native import inductor_options
from ipu_dynamo.options import (
    Check,
    Choice,
    Engine,
    OptionError,
    Options,
    Outlining,
    Strategy,
    check_choices,
    check_count,
    check_names,
    named_options,
)

Fallback = Literal["error", "warn", "allow"]
Recomputing = Literal["auto", "off", "cheap"]


def _of_inductor(name: str) -> str:
    """What to write for an option of PyTorch's own backend; empty: it is none."""
    if name not in inductor_options():
        return ""
    return (
        f'it is one of Inductor: torch.compile(model, backend="inductor") takes it, and '
        f'torch._inductor.config.{name} = ... sets it for the functions of engine="inductor" here'
    )


@partial(named_options, others=_of_inductor)
@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The options of one `torch.compile(model, backend="ipu", options=...)`.

    Args:
        engine: as in `ipu_dynamo.Options`.
        strategy: how blocks become stages. Left out, stages are sharded: they run one after the
            other. With `micro_batches` they are a pipeline.
        micro_batches: equal parts of the batch (dim 0 of the inputs) that go through the stages one
            after the other. Results are those of the whole batch.
        batch_inputs: names of the inputs that are cut, if others have several rows as well.
        fallback: for a captured graph with parts that cannot be placed: `error` raises an error
            that lists them all; with `warn` (a warning) and `allow` (none) plain PyTorch runs it.
        workers: at most so many threads run the IPUs of a pipeline side by side, as in
            `ipu_dynamo.Options`.
        outline: as in `ipu_dynamo.Options`.
        recompute: values that the backward pass computes again instead of keeping them: results of
            operators that cost little for their memory (`cheap`), or none (`off`). `auto` is
            `cheap`, and `off` with micro-batches, as sums over them cannot be computed again.
        without: names of passes to leave out, as in `ipu_dynamo.Options`.
        force: decisions of host passes, as in `ipu_dynamo.Options`.
        check_compiled: as in `ipu_dynamo.Options`.
        enforce_memory: as in `ipu_dynamo.Options`, for each program by itself.
        progress: as in `ipu_dynamo.Options`.

    Raises:
        OptionError: for a value that an option cannot have.
    """

    engine: Engine = "auto"
    strategy: Strategy = field(default_factory=Strategy)
    micro_batches: int = 1
    batch_inputs: tuple[str, ...] | None = None
    fallback: Fallback = "error"
    workers: int | None = None
    outline: Outlining = "auto"
    recompute: Recomputing = "auto"
    without: Sequence[str] = ()
    force: Mapping[str, Choice] = field(default_factory=dict, hash=False)
    check_compiled: Check = "auto"
    enforce_memory: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        check_choices(self)
        n = self.micro_batches
        check_count("option micro_batches", n)
        self._check_batch_inputs()
        self._core(self.strategy)  # checks them
        if self.strategy.phased:
            raise OptionError(
                f"option strategy is {self.strategy.kind}, but torch.compile keeps between forward "
                "and backward what it wants; use a sharded or pipelined strategy, or "
                "ipu_dynamo.compile_training"
            )
        if self.strategy.ipus is not None:
            raise OptionError(
                "option strategy has ipus, but torch.compile has each graph differentiated before "
                "its stages are known, which the times of forward and backward would decide; begin "
                "blocks in the model (ipu_dynamo.BeginBlock), or use ipu_dynamo.compile_training"
            )
        if self.strategy.order_name:
            raise OptionError(
                f"option strategy has schedule {self.strategy.schedule!r}, but micro-batches of "
                "torch.compile run as in GPipe: all forward passes, then all backward passes; "
                "leave the schedule out, or use ipu_dynamo.compile_training"
            )
        if self.strategy.kind == "pipelined" and n == 1:
            raise OptionError(
                "option strategy is pipelined, and a pipeline needs micro-batches; set "
                "micro_batches to 2 or more, or use a sharded strategy"
            )

    def _check_batch_inputs(self) -> None:
        names = self.batch_inputs
        if names is None:
            return
        if isinstance(names, str) or not all(isinstance(name, str) for name in names) or not names:
            raise OptionError(f"option batch_inputs is {names!r}; it lists names of inputs")
        if self.micro_batches == 1:
            raise OptionError("option batch_inputs has no meaning without micro_batches")
        object.__setattr__(self, "batch_inputs", tuple(names))

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass repeats cheap operators."""
        return self.recompute == "cheap" or (self.recompute == "auto" and self.micro_batches == 1)

    def core(self) -> Options:
        """The options of a program; one for micro-batches is a pipeline."""
        strategy = self.strategy
        if self.micro_batches > 1 and strategy.kind == "sharded":
            strategy = replace(strategy, kind="pipelined")
        return self._core(strategy)

    def _core(self, strategy: Strategy) -> Options:
        return Options(
            engine=self.engine,
            strategy=strategy,
            workers=self.workers,
            outline=self.outline,
            without=self.without,
            force=self.force,
            check_compiled=self.check_compiled,
            enforce_memory=self.enforce_memory,
            progress=self.progress,
        )

    @classmethod
    def read(cls, given: object, mode: str | None = None) -> "BackendOptions":
        """The options of one `torch.compile` call.

        Args:
            given: these options, `Options` that say nothing of a whole step, or a dictionary.
            mode: the `mode` of the same call; anything but None is an error.

        Raises:
            OptionError: an option does not exist, or says how a whole training step runs.
        """
        if mode is not None:
            raise OptionError(
                f"backend 'ipu' was reached with mode={mode!r}, and it has no modes; leave mode "
                f"out, or choose another backend"
            )
        if given is None or isinstance(given, BackendOptions):
            return given or cls()
        if isinstance(given, Options):
            default = Options()
            given = {
                f.name: getattr(given, f.name)
                for f in fields(Options)
                if getattr(given, f.name) != getattr(default, f.name)
            }
        if not isinstance(given, Mapping):
            raise OptionError(
                f"options are a dictionary or ipu_dynamo.BackendOptions, got {given!r}"
            )
        known = [f.name for f in fields(cls)]
        for name in (f.name for f in fields(Options)):
            if name == "devices" and name in given:
                raise OptionError(
                    "option devices has no meaning for torch.compile: each layer runs where its "
                    'weights are, which model.to("cuda") says; ipu_dynamo.compile_training has '
                    "devices of IPUs"
                )
            if name in given and name not in known:
                raise OptionError(
                    f"option {name} has no meaning for torch.compile, which calls the model batch "
                    f"by batch and leaves the update to your optimiser; it takes "
                    f"{', '.join(known[:-1])} and {known[-1]}; ipu_dynamo.compile_training takes "
                    f"all options of ipu_dynamo.Options"
                )
        check_names(given, known, _of_inductor)
        values: dict[str, Any] = dict(given)
        return cls(**values)
