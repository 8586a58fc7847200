"""List every step from a captured model to its program, for both front ends: this is the page.

compile_training, compile_inference    whole_step = traced_passes, joint_passes, program_passes,
                                       end_passes, then host_passes
torch.compile(backend="ipu")           captured_passes, placement_passes, then AOTAutograd, which
                                       asks for the joint graph to be cut: aot_passes,
                                       cutting_passes; then for each of the two: flat_passes,
                                       placed_passes, numeric_passes, host_passes
without gradients                      the same but for cutting_passes, on one graph
with micro_batches                     placed_passes, split_passes, then for each piece:
                                       numeric_passes (of the loop: loop_passes), host_passes
the body of a loop or a branch         CutBody, on its joint graph, while autograd differentiates it
an optimiser's step that is traced     update_passes, before the model is compiled, and between
                                       two steps for other numbers; RetraceUpdate for each further
                                       step that was traced; then for each of its functions:
                                       _function_passes
"""

from collections.abc import Mapping, Sequence
from functools import cache

from ipu_dynamo.capture.capture import Joint, Traced
from ipu_dynamo.capture.private.aot import Cutting
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.options import OptionError, Options
from ipu_dynamo.passes.aot.annotate_stages import AnnotateStages
from ipu_dynamo.passes.aot.avoid_reading_values import AvoidReadingValues
from ipu_dynamo.passes.aot.call_checks import CallChecks
from ipu_dynamo.passes.aot.copy_source_lines import CopySourceLines
from ipu_dynamo.passes.aot.drop_repeated_results import DropRepeatedResults
from ipu_dynamo.passes.aot.fix_sizes import FixSizes
from ipu_dynamo.passes.aot.keep_changed import KeepChanged
from ipu_dynamo.passes.aot.keep_draws import KeepDraws
from ipu_dynamo.passes.aot.keep_printed import KeepPrinted
from ipu_dynamo.passes.aot.read_stages import ReadStages
from ipu_dynamo.passes.aot.refuse_sparse import RefuseSparse
from ipu_dynamo.passes.aot.remove_dead_code import RemoveDeadCode
from ipu_dynamo.passes.aot.remove_detach import RemoveDetach
from ipu_dynamo.passes.aot.remove_numbers import RemoveNumbers
from ipu_dynamo.passes.aot.select_by_indices import SelectByIndices
from ipu_dynamo.passes.aot.split_directions import SplitDirections
from ipu_dynamo.passes.aot.start_backward import StartBackward
from ipu_dynamo.passes.host.functions.accumulate_in_loop import AccumulateInLoop
from ipu_dynamo.passes.host.functions.accumulate_matmuls import AccumulateMatmuls
from ipu_dynamo.passes.host.functions.call_onednn_lstms import CallOnednnLstms
from ipu_dynamo.passes.host.functions.fuse_loss import FuseLoss
from ipu_dynamo.passes.host.functions.join_updates import JoinUpdates, can_join
from ipu_dynamo.passes.host.functions.keep_values import KeepValues
from ipu_dynamo.passes.host.functions.random_words import streams_in
from ipu_dynamo.passes.host.functions.set_stage_device import SetStageDevice
from ipu_dynamo.passes.host.functions.write_updates import WriteUpdates
from ipu_dynamo.passes.host.inline_writes import InlineWrites
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.host.recipes.avoid_inductor_faults import AvoidInductorFaults
from ipu_dynamo.passes.host.recipes.choose_matmuls import ChooseMatmuls
from ipu_dynamo.passes.host.recipes.cut_loops import CutLoops
from ipu_dynamo.passes.host.recipes.expand_rounding import ExpandRounding
from ipu_dynamo.passes.host.recipes.make_recipes import MakeRecipes
from ipu_dynamo.passes.host.recipes.prepack_weights import PrepackWeights
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass
from ipu_dynamo.passes.host.recipes.replay_steps import ReplaySteps
from ipu_dynamo.passes.host.recipes.skip_compiling import SkipCompiling
from ipu_dynamo.passes.host.recipes.unfold_convolutions import UnfoldConvolutions
from ipu_dynamo.passes.host.step.choose_threads import ChooseThreads
from ipu_dynamo.passes.host.step.defer_accumulation import DeferAccumulation
from ipu_dynamo.passes.host.step.fuse_step import FuseStep
from ipu_dynamo.passes.host.step.take_share import TakeShare
from ipu_dynamo.passes.joint.anchor_gradients import AnchorGradients
from ipu_dynamo.passes.joint.assign_gradient_stages import AssignGradientStages
from ipu_dynamo.passes.joint.drop_same_views import DropSameViews
from ipu_dynamo.passes.joint.group_collectives import GroupCollectives
from ipu_dynamo.passes.joint.partition import Partition
from ipu_dynamo.passes.joint.precision.floating_point_exceptions import FloatingPointExceptions
from ipu_dynamo.passes.joint.precision.half_partials import HalfPartials
from ipu_dynamo.passes.joint.precision.round_scalars import RoundScalars
from ipu_dynamo.passes.joint.precision.stochastic_rounding import StochasticRounding
from ipu_dynamo.passes.joint.precision.upcast_half_matmuls import UpcastHalfMatmuls
from ipu_dynamo.passes.joint.precision.upcast_norms import UpcastNorms
from ipu_dynamo.passes.joint.print_tensors import PrintTensors
from ipu_dynamo.passes.joint.random_numbers.counter_random import CounterRandom
from ipu_dynamo.passes.joint.random_numbers.number_replicas import NumberReplicas
from ipu_dynamo.passes.joint.recomputation.drop_unread_gates import DropUnreadGates
from ipu_dynamo.passes.joint.recomputation.recompute import Recompute
from ipu_dynamo.passes.joint.recomputation.repeat_lstms import RepeatLstms
from ipu_dynamo.passes.joint.rewrite_bodies import RewriteBodies
from ipu_dynamo.passes.joint.scale_loss import ScaleLoss
from ipu_dynamo.passes.joint.schedule_convolution_groups import ScheduleConvolutionGroups
from ipu_dynamo.passes.joint.separate_anchors import SeparateAnchors
from ipu_dynamo.passes.joint.serialize_loss import SerializeLoss
from ipu_dynamo.passes.joint.serialize_matmul import SerializeMatmul
from ipu_dynamo.passes.joint.sort_by_stage import SortByStage
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.manager import PassManager, forced, without
from ipu_dynamo.passes.micro_batch.cut_batch import CutBatch
from ipu_dynamo.passes.micro_batch.placements import Piece
from ipu_dynamo.passes.micro_batch.prepare_batch import PrepareBatch
from ipu_dynamo.passes.micro_batch.split_batch import SplitBatch
from ipu_dynamo.passes.micro_batch.stream_rows import StreamRows
from ipu_dynamo.passes.program.check_pipeline_hazards import CheckPipelineHazards
from ipu_dynamo.passes.program.emit import Emit
from ipu_dynamo.passes.program.emit_clipping import ClipGradients
from ipu_dynamo.passes.program.emit_streams import EmitStreams
from ipu_dynamo.passes.program.emit_traced import EmitTracedUpdate
from ipu_dynamo.passes.program.emit_update import EmitUpdate, UpdateGroup
from ipu_dynamo.passes.program.lift_streams import LiftStreams
from ipu_dynamo.passes.program.offload_activations import ActivationRule, OffloadActivations
from ipu_dynamo.passes.program.offload_variables import OffloadVariables
from ipu_dynamo.passes.program.outline import Outline
from ipu_dynamo.passes.program.own_results import OwnResults
from ipu_dynamo.passes.program.retrace_update import RetraceUpdate
from ipu_dynamo.passes.program.split_gradient_sums import SplitGradientSums
from ipu_dynamo.passes.program.split_weight_gradients import SplitWeightGradients
from ipu_dynamo.passes.traced.anchor_values import AnchorValues
from ipu_dynamo.passes.traced.call_recurrent_layers import CallRecurrentLayers
from ipu_dynamo.passes.traced.check_types import CheckTypes
from ipu_dynamo.passes.traced.control_flow.cut_body import CutBody
from ipu_dynamo.passes.traced.control_flow.prepare_bodies import PrepareBodies
from ipu_dynamo.passes.traced.control_flow.read_higher_order import ReadHigherOrder
from ipu_dynamo.passes.traced.differentiate import Differentiate
from ipu_dynamo.passes.traced.equal_layers.lengthen_stacks import LengthenStacks
from ipu_dynamo.passes.traced.equal_layers.shorten_stacks import ShortenStacks
from ipu_dynamo.passes.traced.lift_constants import LiftConstants, LiftJointConstants
from ipu_dynamo.passes.traced.loss.identity_loss import IdentityLoss
from ipu_dynamo.passes.traced.loss.sum_loss import SumLoss
from ipu_dynamo.passes.traced.name_values import NameValues
from ipu_dynamo.passes.traced.narrow_types import NarrowTypes
from ipu_dynamo.passes.traced.overlap_io import OverlapIO
from ipu_dynamo.passes.traced.refuse_nested_graphs import RefuseNestedGraphs
from ipu_dynamo.passes.traced.remove_idle_dropout import RemoveIdleDropout
from ipu_dynamo.passes.traced.stages.auto_partition import AutoPartition
from ipu_dynamo.passes.traced.stages.placement import Placement
from ipu_dynamo.passes.traced.stages.read_block_markers import ReadBlockMarkers
from ipu_dynamo.passes.traced.tag_convolution_groups import TagConvolutionGroups
from ipu_dynamo.passes.traced.title_prints import TitlePrints
from ipu_dynamo.passes.traced.writes.defer_writes import DeferWrites
from ipu_dynamo.passes.traced.writes.write_under_mask import WriteUnderMask
from ipu_dynamo.passes.update.assign_owners import AssignOwners
from ipu_dynamo.passes.update.cut_update import CutUpdate
from ipu_dynamo.passes.update.drop_copies import DropCopies
from ipu_dynamo.passes.update.expand_representatives import ExpandRepresentatives
from ipu_dynamo.passes.update.fill_constants import FillConstants
from ipu_dynamo.passes.update.join_equal import JoinEqual
from ipu_dynamo.passes.update.plan_update import PlanUpdate
from ipu_dynamo.passes.update.remove_writes import RemoveWrites
from ipu_dynamo.passes.update.share_counters import ShareCounters
from ipu_dynamo.passes.update.tensorify_scalars import TensorifyScalars
from ipu_dynamo.passes.update_levels import UpdateFunctions, UpdatePlan
from ipu_dynamo.program import Accumulation, Function, HostProgram, Program
from ipu_dynamo.program.ir.traced_update import TracedStep
from ipu_dynamo.program.recipe import FunctionRecipe

Passes = Sequence[Pass]
Owners = Mapping[str, int]  # IPUs of variables, by name
NO_OWNERS: Owners = {}
ANY_MACHINE = Machine()
SPLIT_BATCH = SplitBatch()
_NESTED: tuple[Pass, ...] = (RefuseNestedGraphs(), RemoveIdleDropout())


def whole_step(
    options: Options,
    *,
    training: bool,
    loss: int | None = None,
    groups: Sequence[UpdateGroup] = (),
    may_train_nothing: bool = False,
) -> list[Pass]:
    """All passes of `compile_training` and `compile_inference`, but those left out.

    Args:
        groups: the optimiser's, when training.
        may_train_nothing: accept a loss that depends on no parameter.

    Raises:
        OptionError: a pass is to be left out that does not exist, or that cannot be.
    """
    return left_out(
        [
            *traced_passes(
                options, training=training, loss=loss, may_train_nothing=may_train_nothing
            ),
            *joint_passes(options),
            *program_passes(options),
            *end_passes(options, groups),
        ],
        options,
    )


def traced_passes(
    options: Options,
    *,
    training: bool,
    loss: int | None = None,
    warn: bool = True,
    may_train_nothing: bool = False,
) -> list[Pass]:
    """From the traced model to the graph that autograd makes of it."""
    strategy = options.strategy
    count = options.gradient_accumulation if training else options.device_iterations
    cutting: list[Pass] = []
    if strategy.ipus is not None:
        cutting = [AutoPartition(strategy, count, options.recomputes != "off")]
    return [
        NameValues(),
        TitlePrints(),
        LiftConstants("traced", warn),
        CheckTypes(),
        OverlapIO(options),
        TagConvolutionGroups(options.convolution_memory_proportion),
        *cutting,
        Placement(strategy, count),
        DeferWrites(options.gradient_accumulation if training else 1),
        IdentityLoss(loss),
        PrepareBodies((CheckTypes(), WriteUnderMask(), NarrowTypes(options.narrow), *_NESTED)),
        WriteUnderMask(),
        NarrowTypes(options.narrow),
        SumLoss(),
        RefuseNestedGraphs(),
        RemoveIdleDropout(),
        AnchorValues(options.anchors),
        AnnotateStages(),
        ShortenStacks(),
        Differentiate(may_train_nothing),
        LengthenStacks(may_train_nothing),
    ]


def joint_passes(options: Options) -> list[Pass]:
    """From the graph that autograd made to one in which all is decided but the cut into stages."""
    return [
        LiftJointConstants(),
        AnchorGradients(options.anchors),
        ReadStages(),
        CallChecks(),
        RefuseSparse(),
        RemoveDetach(),
        StartBackward(start_gradient(options)),
        RemoveDeadCode(),
        PrintTensors(),
        CopySourceLines(),
        SerializeLoss(),
        SerializeMatmul(),
        RoundScalars(),
        CounterRandom(),
        NumberReplicas(),
        GroupCollectives(options.replicas, options.strategy.phased),
        AssignGradientStages(),
        ScaleLoss(
            options.has_variable_loss_scale,
            start_gradient(options) / options.loss_scale,
            options.automatic_loss_scaling,
        ),
        ScheduleConvolutionGroups(),
        _half_partials(options),
        UpcastHalfMatmuls(),
        UpcastNorms(options.stable_norm),
        StochasticRounding(options.stochastic_rounding),
        _rewrite_bodies(options),
        Recompute(options.recomputes, options.recompute_budget),
        RepeatLstms(),
        DropUnreadGates(),
        FloatingPointExceptions(options.floating_point_exceptions),
        *([] if options.strategy.keep_stages else [DropSameViews()]),
        SeparateAnchors(),
        *([SortByStage()] if options.strategy.keep_stages else []),
    ]


def program_passes(options: Options, owners: Owners = NO_OWNERS) -> list[Pass]:
    """Return the passes from the complete graph to a program that sums gradients.

    Args:
        owners: IPUs of variables that another program has placed.
    """
    several = options.strategy.kind == "pipelined"
    rule = ActivationRule(options.strategy.liveness, options.locations.activations)
    return [
        Partition(_accumulation(options)),
        SplitGradientSums(),
        *([SplitWeightGradients()] if options.strategy.splits_weights else []),
        Outline(options.outline),
        LiftStreams(),
        OwnResults(),
        *([CheckPipelineHazards()] if several else []),
        OffloadActivations(rule),
        EmitStreams(options),
        Emit(options, dict(owners)),
    ]


def end_passes(options: Options, groups: Sequence[UpdateGroup] = ()) -> list[Pass]:
    """Return the passes from a program that sums gradients to one that updates and moves variables.

    Args:
        groups: of the optimiser, when training.
    """
    groups = tuple(groups)
    return [
        EmitUpdate(options, groups),
        EmitTracedUpdate(options, groups),
        ClipGradients(next((group.clip for group in groups), None)),
        OffloadVariables(options, groups),
    ]


def update_passes(options: Options, known: UpdatePlan | None = None) -> list[Pass]:
    """From the recorded steps of an optimiser to functions that a program calls.

    Args:
        known: the plan of steps that the program has already.
    """
    return left_out(_update_passes(known), options)


def _update_passes(known: UpdatePlan | None = None) -> list[Pass]:
    return [
        RemoveWrites(),
        TensorifyScalars(),
        ShareCounters(),
        FillConstants(),
        DropCopies(),
        JoinEqual(),
        PlanUpdate(known),
        AssignOwners(),
        CutUpdate(),
        ExpandRepresentatives(),
    ]


def retrace(
    program: Program, trace: TracedStep, groups: Sequence[UpdateGroup], options: Options
) -> Program:
    """`program` with the updates of `trace`, which was traced for other numbers.

    Args:
        groups: of the optimiser, as in the program.
    """
    manager = PassManager("retraced", first="program")
    retraced = manager.run([RetraceUpdate(options, trace, groups)], program)
    assert isinstance(retraced, Program), "RetraceUpdate makes a program"
    return retraced


def host_passes(options: Options, machine: Machine = ANY_MACHINE) -> list[Pass]:
    """Return the passes from a program to the host's program for this computer."""
    return [*writing_passes(options, machine), *form_passes(options, machine)]


def writing_passes(options: Options, machine: Machine) -> list[Pass]:
    """Return the passes to a program whose functions write, on their devices; caches keep it."""
    return left_out(_writing_passes(machine), options)


def _writing_passes(machine: Machine) -> list[Pass]:
    return [
        InlineWrites(),
        AccumulateInLoop(),
        FuseLoss(),
        AccumulateMatmuls(),
        SetStageDevice(tuple(machine.devices)),
    ]


def form_passes(options: Options, machine: Machine) -> list[Pass]:
    """From functions that write to those that this processor runs, and the form of a step."""
    return left_out(_form_passes(options, machine), options)


def update_recipe(
    options: Options,
    machine: Machine,
    function: Function,
    threads: int | None,
    *,
    keep_weight: bool,
    once: bool,
    writes: bool = True,
    elements: int | None = None,
) -> FunctionRecipe | None:
    """How the function of a traced update becomes a callable; None: it cannot be joined.

    Args:
        keep_weight: it returns the new weight, and does not write it.
        once: it runs operator by operator, as it runs once: to compile it would take longer.
        writes: it writes weight and states; else it returns the function's results.
        elements: of parameters that are updated together, in a row; None: one has its own shape.
    """
    if elements is not None and not can_join(function):
        return None
    steps = left_out(_function_passes(elements, keep_weight=keep_weight, writes=writes), options)
    rewritten = PassManager("update_function", first="function").run(steps, function)
    assert isinstance(rewritten, Function), "these passes make functions"
    return recipe_of(rewritten, options, ANY_MACHINE if once else machine, threads)


def _function_passes(
    elements: int | None = None, *, keep_weight: bool = False, writes: bool = True
) -> list[Pass]:
    joins = [] if elements is None else [JoinUpdates(elements)]
    return [*joins, *([WriteUpdates(keep_weight)] if writes else [])]


def recipe_of(
    function: Function, options: Options, machine: Machine, threads: int | None = None
) -> FunctionRecipe:
    """How a function becomes a callable that no loop of a program calls."""
    recipe = MakeRecipes(machine.compiles).recipe(function, threads)
    with compile_lock():
        for step in left_out(_recipe_passes(machine), options):
            assert isinstance(step, RecipePass)
            recipe, _ = step.with_bodies(recipe, None)
    return recipe


def _form_passes(options: Options, machine: Machine) -> list[Pass]:
    return [
        KeepValues(machine.memory, streams_in(machine.constants)),
        CallOnednnLstms(),
        DeferAccumulation(options.side_by_side),
        ChooseThreads(options.strategy.several_at_once, machine.share),
        FuseStep(machine.compiles, machine.hyperparameters),
        *_share_passes(machine),
        MakeRecipes(machine.compiles),
        *_recipe_passes(machine),
    ]


def _share_passes(machine: Machine) -> list[Pass]:
    return [] if machine.share is None else [TakeShare(machine.share)]


def _recipe_passes(machine: Machine) -> list[RecipePass]:
    """Those that look at one function at a time."""
    figures = machine.figures
    return [
        ExpandRounding(),
        AvoidInductorFaults(),
        UnfoldConvolutions(figures),
        PrepackWeights(machine.own_tensors, figures),
        ChooseMatmuls(figures),
        SkipCompiling(),
        CutLoops(),
        ReplaySteps(),
    ]


def captured_passes() -> list[Pass]:
    """Return the first passes on a graph that Dynamo captured."""
    return [ReadBlockMarkers(), ReadHigherOrder()]


def placement_passes(options: Options) -> list[Pass]:
    """Return the passes on a graph of Dynamo, before AOTAutograd makes flat graphs of it."""
    return left_out(
        [
            TitlePrints(),
            RemoveIdleDropout(),
            CallRecurrentLayers(),
            Placement(options.strategy, None),
            AnnotateStages(),
        ],
        options,
    )


def aot_passes(options: Options, *, micro_batches: bool = False) -> list[Pass]:
    """Return the passes on AOTAutograd's joint graph, or on a graph of inference.

    Args:
        micro_batches: the batch is to be split, and a loop over rows cannot be.

    Raises:
        OptionError: for stochastic rounding: such a program has no random stream for it.
    """
    if options.stochastic_rounding:
        raise OptionError(
            "option stochastic_rounding does not work through torch.compile; use "
            "ipu_dynamo.compile_training or compile_inference"
        )
    return left_out(
        [
            AvoidReadingValues(),
            SelectByIndices(),
            FixSizes(),
            WriteUnderMask("joint"),
            RemoveDetach(),
            ReadStages(),
            *([] if micro_batches else [SerializeLoss()]),
            SerializeMatmul(),
            RoundScalars(),
        ],
        options,
    )


def cutting_passes(
    options: Options, cutting: Cutting = "minimum", results: int = 0, lasting: Sequence[int] = ()
) -> list[Pass]:
    """Those that make a forward and a backward graph of the joint one; see `SplitDirections`."""
    steps: list[Pass] = [
        KeepDraws(),
        KeepPrinted(),
        KeepChanged(),
        RepeatLstms(apart=True),
        DropUnreadGates(),
        SplitDirections(cutting, results, tuple(lasting)),
    ]
    return left_out(steps, options)


def flat_passes(options: Options) -> list[Pass]:
    """Return the passes on a forward, backward or inference graph: it gets an input per tensor."""
    return left_out(
        [
            CallChecks(),
            GroupCollectives(),
            RefuseNestedGraphs("joint"),
            RemoveNumbers(),
            LiftJointConstants(warn=False),
        ],
        options,
    )


def placed_passes(options: Options) -> list[Pass]:
    """Those on a flat graph whose inputs and outputs are described; then it can be split."""
    return left_out([DropRepeatedResults(), AssignGradientStages()], options)


def split_passes(split: SplitBatch = SPLIT_BATCH) -> list[Pass]:
    """Return the passes that cut a placed flat graph into pieces for micro-batches."""
    return [PrepareBatch(), split, CutBatch()]


def loop_passes(options: Options, piece: Piece, owners: Owners) -> list[Pass]:
    """Return the passes from the piece of each micro-batch to its program."""
    joins = tuple((join.how, join.rows) for join in piece.joins)
    return [*numeric_passes(options, owners), StreamRows(piece.slices, joins)]


def numeric_passes(options: Options, owners: Owners = NO_OWNERS) -> list[Pass]:
    """From a placed flat graph, or a piece of one, to its program.

    Args:
        owners: IPUs of variables that another program has placed.
    """
    return left_out(
        [
            DropUnreadGates(),
            _half_partials(options),
            UpcastHalfMatmuls(),
            FloatingPointExceptions(options.floating_point_exceptions),
            _rewrite_bodies(options),
            *program_passes(options, owners),
        ],
        options,
    )


def lower(model: Traced | Joint, passes: Passes, manager: PassManager | None = None) -> Program:
    """The program that `passes` make of a capture."""
    manager = PassManager("graph") if manager is None else manager
    program = manager.run(passes, model)
    assert isinstance(program, Program), "Emit makes a program"
    return program


def lower_update(update: RecordedUpdate, passes: Passes, manager: PassManager) -> UpdateFunctions:
    """The functions that `passes`, as `update_passes` has them, make of recorded steps."""
    with compile_lock():
        functions = manager.run(passes, update)
    assert isinstance(functions, UpdateFunctions), "CutUpdate makes functions"
    return functions


def run_host_passes(
    program: Program | HostProgram,
    passes: Passes | None = None,
    manager: PassManager | None = None,
) -> HostProgram:
    """Run host passes on `program`, and return this computer's program for it.

    Args:
        program: a program, with `InlineWrites` as the first pass, or the result of earlier passes.
        passes: None: all host passes with default options.
    """
    manager = PassManager("program", first="program") if manager is None else manager
    with compile_lock():
        host = manager.run(host_passes(Options()) if passes is None else passes, program)
    assert isinstance(host, HostProgram), "InlineWrites is the first pass"
    return host


def with_update(program: Program, machine: Machine = ANY_MACHINE) -> HostProgram:
    """Return this computer's program for one whose updates were traced for other numbers.

    Only the parts before and after its micro-batches are run.
    """
    host = HostProgram(program, program)
    if machine.share is None:
        return host
    return run_host_passes(host, _share_passes(machine), PassManager("retraced", first="host"))


@cache
def all_passes() -> tuple[Pass, ...]:
    """Every pass that there is, once, with default options."""
    options = Options()
    steps: list[Pass] = [
        *traced_passes(options, training=True),
        AutoPartition(options.strategy, 1, again=False),
        *joint_passes(options),
        *program_passes(options),
        *end_passes(options),
        *_writing_passes(ANY_MACHINE),
        *_form_passes(options, ANY_MACHINE),
        *_update_passes(),
        RetraceUpdate(options),
        TakeShare(),
        *_function_passes(1),
        SortByStage(),
        SplitWeightGradients(),
        CheckPipelineHazards(),
        ReadBlockMarkers(),
        ReadHigherOrder(),
        CallRecurrentLayers(),
        AvoidReadingValues(),
        SelectByIndices(),
        FixSizes(),
        KeepDraws(),
        KeepPrinted(),
        KeepChanged(),
        RepeatLstms(apart=True),
        DropUnreadGates(),
        SplitDirections(),
        CutBody(),
        RemoveNumbers(),
        DropRepeatedResults(),
        *split_passes(),
        StreamRows(),
    ]
    return tuple({step.name: step for step in steps}.values())


def left_out(passes: Passes, options: Options) -> list[Pass]:
    """`passes` but those that the options, or the environment, leave out; others as they force."""
    known = all_passes()
    return forced(without(passes, options.without, known), options.force, known)


def start_gradient(options: Options) -> float:
    """Return the gradient of the loss with which the backward pass begins."""
    if options.reduction == "mean" and options.mean_strategy == "post_and_loss":
        return options.loss_scale / options.replicas
    return options.loss_scale


def _rewrite_bodies(options: Options) -> RewriteBodies:
    return RewriteBodies(
        (
            CallChecks(),
            RefuseSparse(),
            RemoveDetach(),
            RemoveDeadCode(),
            SerializeLoss(),
            SerializeMatmul(),
            RoundScalars(),
            _half_partials(options),
            UpcastHalfMatmuls(),
            FloatingPointExceptions(options.floating_point_exceptions),
        ),
        options.stochastic_rounding,
    )


def _half_partials(options: Options) -> HalfPartials:
    return HalfPartials(
        options.partials_chunk,
        matmuls=options.partials == "half",
        convolutions=options.convolution_partials == "half",
    )


def _accumulation(options: Options) -> Accumulation:
    if options.gradient_accumulation == 1:
        return "store"
    running = options.reduction == "mean" and options.mean_strategy == "running"
    return "mean" if running else "+="
