"""Hold the options of the core, checked once where they enter."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from ipu_dynamo.errors import OptionError
from ipu_dynamo.options.anchors import Anchor
from ipu_dynamo.options.checks import (
    check_choice,
    check_choices,
    check_count,
    check_names,
    described,
    named_options,
)
from ipu_dynamo.options.devices import Device, read_devices
from ipu_dynamo.options.locations import Locations
from ipu_dynamo.options.loss_scaling import AutomaticLossScaling
from ipu_dynamo.options.mesh import mesh_shape, read_mesh
from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.options.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
else:
    DeviceMesh = None.__class__  # a text has None alone, and the class is slow to import

Engine = Literal["auto", "inductor", "eager"]
Check = Literal["auto", "first", "every", "off"]
Start = Literal["auto", "compiled", "now"]
Recomputation = Literal["auto", "off", "stages", "all"]
Outlining = Literal["auto"] | bool
SyncPattern = Literal["full", "single_pipeline", "replica_and_ladder"]
START = "IPU_DYNAMO_START"  # environment variable: the choice for `auto`
MEMORY_PROPORTION = 0.6  # by default, as in Poplar
Choice = bool | str  # of a decision
OutputMode = Literal["default", "all", "every", "final", "sum"]
_COUNTS = (
    "device_iterations",
    "gradient_accumulation",
    "replicas",
    "input_group_size",
    "return_period",
    "partials_chunk",
)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "loss_scale": (int, float),
    "automatic_loss_scaling": (AutomaticLossScaling, type(None)),
    "loss_scale_is_variable": bool,
    "strategy": Strategy,
    "locations": Locations,
    "recompute_here": bool,
    "narrow": bool,
    "stable_norm": bool,
    "stochastic_rounding": bool,
    "floating_point_exceptions": bool,
    "guard_updates": bool,
    "replica_groups": Mapping,
    "input_groups_orthogonal": bool,
    "seed": (int, type(None)),
    "side_by_side": (bool, type(None)),
    "program_cache": (str, type(None)),
    "enforce_memory": (str, type(None)),
    "progress": bool,
    "without": Sequence,
    "force": Mapping,
    "skipped_sources": (Sequence, type(None)),
    "anchors": Mapping,
    "module_names": bool,
    "synthetic_data": bool,
}


_WANTED: dict[type, str] = {
    AutomaticLossScaling: "an ipu_dynamo.AutomaticLossScaling",
    Locations: "an ipu_dynamo.Locations",
    Mapping: "a dictionary",
    Sequence: "a list",
    Strategy: 'an ipu_dynamo.Strategy, such as Strategy(kind="pipelined")',
    bool: "True or False",
    float: "a float",
    int: "an int",
    str: "a str",
    type(None): "None",
}


def _wanted(kinds: type | tuple[type, ...]) -> str:
    """The types of an option's values, in words."""
    return " or ".join(_WANTED[kind] for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


@named_options
@dataclass(frozen=True, slots=True)
class Options:
    """The options of one compilation.

    Args:
        engine: `inductor` compiles stages (needs a C++ compiler), `eager` runs operators one by
            one and is the reference; `auto` takes the first that works here.
        device_iterations: steps (training) or micro-batches (inference) per call.
        gradient_accumulation: micro-batches per replica whose gradients make one update.
        replicas: copies of the model that work on different data; on ranks, those of all ranks.
        input_group_size: replicas that read the same data.
        input_groups_orthogonal: groups are strided (`r % groups`) and not consecutive replicas.
        replica_groups: parameters and buffers of which each group of replicas has its own, by name.
            In the model such a tensor has a leading dimension over the groups; forward sees the
            slice of its replica's group. Its gradient is summed over the replicas of the group.
        output_mode: which micro-batches are returned: `all`, the `final` one of each replica,
            those of `every` n-th device iteration, or their `sum`; `default` is `all` for
            inference and `final` for training.
        return_period: with `every`, return each n-th device iteration.
        reduction: gradients over micro-batches and replicas are averaged or summed.
        mean_strategy: when an average divides: after the sum (`post`), at every accumulation
            (`running`), or by the replicas before the backward pass (`post_and_loss`).
        loss_scale: the loss is multiplied by it in the backward pass, and gradients are divided by
            it before the update: it moves half-precision gradients to a better range.
        automatic_loss_scaling: the loss scale begins with `loss_scale`, and follows the size of the
            gradients in float16. None: it stays.
        loss_scale_is_variable: `CompiledModel.set_loss_scale` may change it without compiling
            again, as with automatic scaling.
        strategy: how blocks become stages.
        locations: the tensors that are kept in streaming memory, outside of the IPUs.
        io_tiles: tiles of each IPU that only transfer: none, or an even number from 32 to 192.
            Overlapped inputs and outputs need some.
        memory_proportion: the share of an IPU's memory that a product may use for temporary values:
            for all IPUs, or by IPU, `{0: 0.2}`; others have the default. It is in the program's
            text, for a model of an IPU's memory and cycles, and changes no result.
        convolution_memory_proportion: the same of convolutions; None: `memory_proportion`.
        sync_pattern: which IPUs wait for a transfer to or from the host: all (`full`), only the one
            that transfers (`single_pipeline`), or its replica or half of the IPUs
            (`replica_and_ladder`). It is in the program's text, likewise.
        recompute: stages that keep only their inputs and the values marked by
            `recomputation_checkpoint`: none (`off`), all but the last (`stages`), or all (`all`).
            They compute other values again in the backward pass. With `all` the last stage keeps a
            few more values. `auto` is `stages` in a pipeline, else `off`.
        recompute_budget: bytes that a micro-batch may need at its peak, without variables and
            inputs: all stages recompute, but only as much as the budget requires.
        recompute_here: the recomputation by `recompute`, a budget or marks also saves memory of
            this computer. False: it is for an IPU's memory, as in options of poptorch, IPUConfig
            and Keras. As with `auto`, this computer then keeps the values if it has enough memory.
        outline: make repeated blocks, such as equal layers, one function that is called many times
            and compiled once. `auto` does it for at least three equal blocks, if they are so large
            that calls cost little; it puts small ones together. True does it for all.
        narrow: as PopTorch does, carry int64 as int32, float64 as float32 and bfloat16 as
            float16, and treat integer parameters and buffers as constants. If a layer's weights and
            input differ in precision, the layer computes in that of the input.
        partials: precision of the partial sums of products of halves. `half` cuts the reduction
            into chunks of `partials_chunk` elements, sums each in float32 and adds the chunks' sums
            in float16, rounding each time.
        convolution_partials: the same for convolutions of halves.
        partials_chunk: elements in a chunk, at least 16.
        stable_norm: take the statistics of norms on halves in float32. Those of norms on float32
            are taken by two passes or Welford's method in any case.
        stochastic_rounding: round results and weights in half precision up or down at random,
            without bias; reproducible from `seed`.
        floating_point_exceptions: stop at an invalid operation, a division by zero, an overflow
            or a comparison with nan, and name the operator. Stages then run on the eager engine.
        guard_updates: keep copies of weights and optimiser state while an update writes them, and
            put them back if it fails: as much memory again. Without it a program whose update
            failed half-way refuses calls until weights and state are written again. Not with
            `update="host"`: that optimiser has states of its own.
        workers: the most threads that run in parallel. They run the IPUs of a pipelined strategy or
            of parallel phases, or the device iterations of inference on one IPU. A single one runs
            micro-batch by micro-batch. None: one for each IPU of every replica, or for each
            iteration, as far as there are cores; only one if stages are too small to gain from
            more. The results are the same bits.
        side_by_side: if the model is one stage, run the micro-batches of an update in parallel, on
            at most `workers` threads; operators then use one thread each. A worker keeps the
            gradients of its micro-batch until those of the micro-batch before are added. This takes
            memory for a set of gradients on each worker. The results are the same bits for any
            number of workers. None: if PyTorch has several threads, and adding its gradients takes
            a small part of a micro-batch's time. False: one after the other, with all of PyTorch's
            threads in each operator; products then add to accumulators directly.
        devices: torch devices such as `cpu` or `cuda:1`: one for all IPUs, or one for each IPU of a
            replica, in order; all of one kind. None: the device of the model.
        without: names of passes to leave out, to see their effect or to get around a fault; the
            environment variable IPU_DYNAMO_WITHOUT adds to them. Some cannot be left out.
        force: decisions of host passes by the pass's name, even if they are slower on this machine:
            `{"FuseStep": True, "ChooseMatmuls": "onednn"}`. An impossible decision is an error.
        anchors: values inside the program that each call brings to the host, by a name for each:
            `CompiledModel.anchored(name)` has that of the last call. Nothing else changes.
        module_names: values are named by the path of the module that computes them.
        skipped_sources: parts of names of files, whose lines are not the model's: errors and
            programs name the innermost line of other files. None: PyTorch's and this package's.
        synthetic_data: calls do not look at their inputs, but compute on normal values, or zeros in
            place of integers, and return zeros: to measure a program without its data.
        program_cache: a folder in which programs are kept. The next process that compiles the same
            model traces it once, and takes the program from there. None keeps none.
        program_cache_limit: bytes of all programs in it; beyond, the least recently used ones are
            deleted. 0: all stay.
        check_compiled: compiled functions are compared with the same functions operator by
            operator: in their `first` runs, in `every` run, or never (`off`). A function that
            differs runs operator by operator from then on, in that call, too, and a warning names
            it. `auto` is the value of the environment variable IPU_DYNAMO_CHECK_COMPILED, else
            `first`.
        start: when the first step runs: once its functions are `compiled`, or `now`, operator by
            operator, while another process compiles them. Compiled functions take over at the
            beginning of a later call, so results depend in their last bits on that moment, which
            differs from run to run. A mesh and saved programs do not have it. `auto` is the value
            of the environment variable IPU_DYNAMO_START, else `compiled`.
        enforce_memory: the name of IPUs, such as `bow`, whose memory is predicted. A program that
            does not fit raises an error, and one that may not fit a warning. None takes the name in
            the environment variable IPU_DYNAMO_ENFORCE_MEMORY. Without a name, or with an empty
            one, nothing is predicted.
        progress: show the steps of a compilation on stderr, once it has taken three seconds; with
            several ranks, rank 0 does. False, or the environment variable IPU_DYNAMO_PROGRESS=0,
            shows nothing.
        record: `timeline` keeps the times of the last call: of steps, stage passes, copies and
            updates, with memory. `ipu_dynamo.inspect(model).program.host.timeline` and
            `executable.timeline` have them. None: no call is timed.
        seed: of the random numbers; None takes one from torch's generator when compiling. A
            program's numbers depend on the seed, the call, the micro-batch and the replica only.
        mesh: the ranks of torch.distributed that run the program together: a DeviceMesh of device
            type `cpu` whose dimensions are called `replica`, `ipu`, or both. Each rank runs a block
            of the replicas and a block of the IPUs; a call takes the rows of its replicas and
            returns their results. None: this process runs all.

    Raises:
        OptionError: for a value that an option cannot have.
    """

    engine: Engine = "auto"
    device_iterations: int = 1
    gradient_accumulation: int = 1
    replicas: int = 1
    input_group_size: int = 1
    input_groups_orthogonal: bool = False
    replica_groups: Mapping[str, ReplicaGroups] = field(default_factory=dict, hash=False)
    output_mode: OutputMode = "default"
    return_period: int = 1
    reduction: Literal["mean", "sum"] = "mean"
    mean_strategy: Literal["post", "running", "post_and_loss"] = "post"
    loss_scale: float = 1.0
    automatic_loss_scaling: AutomaticLossScaling | None = None
    loss_scale_is_variable: bool = False
    strategy: Strategy = field(default_factory=Strategy)
    locations: Locations = field(default_factory=Locations)
    io_tiles: int = 0
    memory_proportion: float | Mapping[int, float] = field(default=MEMORY_PROPORTION, hash=False)
    convolution_memory_proportion: float | None = None
    sync_pattern: SyncPattern = "full"
    recompute: Recomputation = "auto"
    recompute_budget: int | None = None
    recompute_here: bool = True
    outline: Outlining = "auto"
    narrow: bool = False
    partials: Literal["float", "half"] = "float"
    convolution_partials: Literal["float", "half"] = "float"
    partials_chunk: int = 64
    stable_norm: bool = False
    stochastic_rounding: bool = False
    floating_point_exceptions: bool = False
    guard_updates: bool = False
    workers: int | None = None
    side_by_side: bool | None = None
    devices: Device | Sequence[Device] | None = None
    without: Sequence[str] = ()
    force: Mapping[str, Choice] = field(default_factory=dict, hash=False)
    anchors: Mapping[str, Anchor] = field(default_factory=dict, hash=False)
    module_names: bool = True
    skipped_sources: Sequence[str] | None = None
    synthetic_data: bool = False
    program_cache: str | None = None
    program_cache_limit: int = 1 << 32
    check_compiled: Check = "auto"
    start: Start = "auto"
    enforce_memory: str | None = None
    progress: bool = True
    record: Literal["timeline"] | None = None
    seed: int | None = None
    mesh: "DeviceMesh | None" = None

    def __post_init__(self) -> None:
        check_choices(self)
        for name in _COUNTS:
            check_count(f"option {name}", getattr(self, name))
        if self.outline != "auto" and not isinstance(self.outline, bool):
            raise OptionError(f"option outline is {self.outline!r}; choose auto, True or False")
        for name, kinds in _KINDS.items():
            if not isinstance(value := getattr(self, name), kinds):
                raise OptionError(f"option {name} takes {_wanted(kinds)}, not {described(value)}")
        tiles = self.io_tiles
        if type(tiles) is not int or (tiles and (tiles % 2 or not 32 <= tiles <= 192)):
            raise OptionError(
                f"option io_tiles is {tiles!r}; it is 0, or an even number from 32 to 192"
            )
        self._check_memory_proportion()
        if not 0.0 < self.loss_scale < math.inf:
            raise OptionError(f"option loss_scale is {self.loss_scale!r}; it is a positive number")
        if self.record not in (None, "timeline"):
            raise OptionError(f"option record is {self.record!r}; choose timeline, or None")
        if self.partials_chunk < 16:
            raise OptionError(f"option partials_chunk is {self.partials_chunk}; it is at least 16")
        check_count("option workers", self.workers, or_none=True)
        if type(limit := self.program_cache_limit) is not int or limit < 0:
            raise OptionError(
                f"option program_cache_limit is {limit!r}; it is a number of bytes, or 0"
            )
        budget = self.recompute_budget
        if budget is not None and (type(budget) is not int or budget < 1):
            raise OptionError(
                f"option recompute_budget is {budget!r}; it is a number of bytes, or None"
            )
        if budget is not None and self.recompute in ("off", "stages"):
            raise OptionError(
                f"option recompute is {self.recompute!r}, but a recompute_budget decides by itself "
                f"what every stage recomputes; choose auto or all"
            )
        if self.replicas % self.input_group_size:
            raise OptionError(
                f"option input_group_size is {self.input_group_size}; it must divide the "
                f"{self.replicas} replicas"
            )
        self._check_texts("without", "names of passes: ('Outline',)")
        self._check_texts("skipped_sources", "parts of names of files: ('layers.py',)")
        for name, choice in self.force.items():
            if not isinstance(name, str) or not isinstance(choice, bool | str):
                raise OptionError(
                    f"option force is {self.force!r}; it has choices by names of passes: "
                    "{'FuseStep': True}"
                )
        self._check_replica_groups()
        self._check_anchors()
        self._check_devices()
        self._check_mesh()
        if self.return_period != 1 and self.output_mode != "every":
            raise OptionError(
                f"option return_period is {self.return_period}, and output_mode is "
                f"{self.output_mode!r}; a period is for output_mode='every'"
            )
        if self.output_mode == "every" and self.device_iterations % self.return_period:
            raise OptionError(
                f"option return_period is {self.return_period}; it must be a factor of the "
                f"{self.device_iterations} device iterations"
            )

    def _check_texts(self, option: str, what: str) -> None:
        texts = getattr(self, option)
        if texts is None:
            return
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise OptionError(f"option {option} is {texts!r}; it is a tuple of {what}")
        object.__setattr__(self, option, tuple(texts))

    def _check_memory_proportion(self) -> None:
        given = self.memory_proportion
        by_ipu = given if isinstance(given, Mapping) else {0: given}
        for ipu, share in by_ipu.items():
            if type(ipu) is not int or ipu < 0 or not _is_share(share):
                raise OptionError(
                    f"option memory_proportion is {given!r}; it is a number from 0 to 1, or such "
                    "numbers by IPU: {0: 0.2}"
                )
        own = self.convolution_memory_proportion
        if own is not None and not _is_share(own):
            raise OptionError(
                f"option convolution_memory_proportion is {own!r}; it is a number from 0 to 1"
            )

    def memory_proportions(self, num_ipus: int) -> tuple[float, ...]:
        """The memory proportion of each IPU; empty where all have the default.

        Args:
            num_ipus: IPUs of the program.
        """
        given = self.memory_proportion
        each = [
            float(given.get(ipu, MEMORY_PROPORTION) if isinstance(given, Mapping) else given)
            for ipu in range(num_ipus)
        ]
        return () if set(each) <= {MEMORY_PROPORTION} else tuple(each)

    def _check_replica_groups(self) -> None:
        for name, groups in self.replica_groups.items():
            if not isinstance(groups, ReplicaGroups):
                raise OptionError(
                    f"option replica_groups has {groups!r} for {name}; give a ReplicaGroups"
                )
            if self.replicas % groups.size:
                raise OptionError(
                    f"option replica_groups has groups of {groups.size} for {name}; their size "
                    f"must divide the {self.replicas} replicas"
                )

    def _check_anchors(self) -> None:
        for name, anchor in self.anchors.items():
            if not isinstance(anchor, Anchor):
                raise OptionError(f"option anchors has {anchor!r} for {name}; give an Anchor")

    def _check_devices(self) -> None:
        if self.devices is not None:
            try:
                object.__setattr__(self, "devices", read_devices(self.devices))
            except ValueError as error:
                raise OptionError(f"option devices {error}") from error

    def _check_mesh(self) -> None:
        if self.mesh is None:
            return
        object.__setattr__(self, "mesh", read_mesh(self.mesh))
        if self.start == "now":
            raise OptionError(
                "option start is 'now', and ranks of a mesh compile together before their first "
                "step\n  try:  leave start out"
            )
        rows, columns = self.grid
        if self.replicas % rows:
            raise OptionError(
                f"option replicas is {self.replicas}, the number on all ranks together; it must be "
                f"a multiple of the {rows} ranks that the mesh has in its dimension replica"
            )
        local = self.replicas // rows
        groups = {f"replica_groups of {name}": each for name, each in self.replica_groups.items()}
        for option, each in {"input_group_size": self.input_replica_groups, **groups}.items():
            if not each.are_whole(self.replicas, local):
                raise OptionError(
                    f"option {option} has a {each}, and no rank with its {local} replicas has a "
                    "whole one\n"
                    "  try:  consecutive groups whose size divides the replicas of a rank"
                )
        if columns > 1 and self.strategy.phased:
            raise OptionError(
                f"a strategy of kind {self.strategy.kind} runs on ranks that have all its IPUs, "
                f"and the mesh has {columns} ranks in its dimension ipu\n"
                "  try:  a pipelined strategy, or a mesh with the dimension replica alone"
            )
        if any(name.startswith("cuda") for name in self.device_names or ()):
            raise OptionError(
                f"option devices is {', '.join(self.device_names or ())}, and ranks of a mesh run "
                'programs on CPUs\n  try:  devices="cpu", or no mesh'
            )

    @classmethod
    def read(cls, given: "Options | dict[str, Any] | None") -> "Options":
        """Options from a dictionary of their names, as `torch.compile(options=...)` passes them.

        Args:
            given: options, or values by name; None: the defaults.

        Raises:
            OptionError: for an unknown name, with the nearest known ones, or another object.
        """
        if given is None:
            return cls()
        if isinstance(given, Options):
            return given
        if not isinstance(given, Mapping):
            raise OptionError(
                "options are an ipu_dynamo.Options, or a dict of its names, and not an object of "
                f"class {type(given).__name__}"
            )
        check_names(given, [f.name for f in fields(cls)])
        return cls(**given)

    @property
    def grid(self) -> tuple[int, int]:
        """The blocks into which ranks cut the replicas, and those into which they cut the IPUs."""
        return (1, 1) if self.mesh is None else mesh_shape(self.mesh)

    @property
    def stage_engine(self) -> Engine:
        """The engine that stages run on: checks between operators keep these apart."""
        return "eager" if self.floating_point_exceptions else self.engine

    @property
    def starts_now(self) -> bool:
        """Whether steps run before functions are compiled: see `start`.

        Raises:
            OptionError: the environment variable has another value than the option could have.
        """
        if self.start != "auto" or self.mesh is not None:
            return self.start == "now"
        named = os.environ.get(START) or "compiled"
        check_choice(START, named, ("compiled", "now"))
        return named == "now"

    @property
    def recomputes(self) -> Literal["off", "stages", "all"]:
        """The kind of recomputation that is in force."""
        if self.recompute != "auto":
            return self.recompute
        if self.recompute_budget is not None:
            return "all"
        return "stages" if self.strategy.kind == "pipelined" else "off"

    @property
    def asks_to_recompute(self) -> bool:
        """Whether recomputation is asked for on this computer, apart from the model's marks."""
        named = self.recompute in ("stages", "all") or self.recompute_budget is not None
        return self.recompute_here and named

    @property
    def has_variable_loss_scale(self) -> bool:
        """Whether the loss scale may change without compiling again."""
        return self.loss_scale_is_variable or self.automatic_loss_scaling is not None

    @property
    def input_replica_groups(self) -> ReplicaGroups:
        """The replicas that read the same data."""
        return ReplicaGroups(self.input_group_size, self.input_groups_orthogonal)

    @property
    def device_names(self) -> tuple[str, ...] | None:
        """`devices` as they were read."""
        return self.devices  # type: ignore[return-value]

    @property
    def input_groups(self) -> int:
        return self.input_replica_groups.count(self.replicas)

    def returns(self, training: bool) -> OutputMode:
        """The output mode that is in force.

        Args:
            training: the program trains.
        """
        if self.output_mode != "default":
            return self.output_mode
        return "final" if training else "all"


def _is_share(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and bool(0 <= value <= 1)
