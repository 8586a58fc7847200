"""Decide the stages of a converted program, and write the files about them.

`auto` searches, `manual` matches expressions, `load` reads a solution file. Nothing is written
here.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ipu_dynamo.saved_model.conversion.drafts.draft import Draft, Placement
from ipu_dynamo.saved_model.conversion.drafts.fixed_program import (
    FixedProgram,
    fix_rows,
    micro_batch_of,
)
from ipu_dynamo.saved_model.conversion.pipelines.check_stages import check_stages
from ipu_dynamo.saved_model.conversion.pipelines.cost_constants import MEMORY_PER_IPU
from ipu_dynamo.saved_model.conversion.pipelines.estimate_costs import estimate_cycles
from ipu_dynamo.saved_model.conversion.pipelines.manual_stages import manual_stages
from ipu_dynamo.saved_model.conversion.pipelines.measure_costs import measure_seconds
from ipu_dynamo.saved_model.conversion.pipelines.nodes_of_stages import (
    StageNodes,
    check_searchable,
    is_identity,
    stage_nodes,
    with_all_nodes,
    with_casts,
    work_list,
)
from ipu_dynamo.saved_model.conversion.pipelines.search_stages import Limits, Search, Sizes
from ipu_dynamo.saved_model.conversion.pipelines.solution_file import (
    read_solution,
    read_solution_file,
    write_solution,
)
from ipu_dynamo.saved_model.conversion.pipelines.stage_profile import FILE, StageProfile
from ipu_dynamo.saved_model.conversion.pipelines.tied_nodes import blocks, why_tied
from ipu_dynamo.saved_model.conversion.pipelines.work_list import WorkNode
from ipu_dynamo.saved_model.conversion.settings.options import ConversionOptions
from ipu_dynamo.saved_model.conversion.settings.pipeline_config import PipelineConfig, Solution

ESTIMATE = "costs: estimated for a Mk2 IPU, not measured"
MEASURED = "costs: measured on this computer"


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Stages, and the files about them.

    Attributes:
        placement: of the draft, with stages and their IPUs.
        num_ipus: the number of IPUs that the program needs.
        solution: the stage of every node of stages.
        files: content by absolute path: the solution file, profiles.
        file_options: the key of the configuration that each path comes from.
        message: the source of the costs, for the user.
        warnings: for the user.
        measured: stages were searched by costs that another run may measure otherwise.
    """

    placement: Placement
    num_ipus: int
    solution: Solution
    files: Mapping[Path, bytes]
    file_options: Mapping[Path, str]
    message: str
    warnings: tuple[str, ...]
    measured: bool


def plan_pipeline(
    draft: Draft,
    options: ConversionOptions,
    *,
    memory_per_ipu: int | None = None,
    solution: Any = None,
) -> PipelinePlan:
    """The stages that `pipeline_cfg` asks for.

    Args:
        draft: after all passes.
        memory_per_ipu: bytes; None: those of an IPU.
        solution: stages of an earlier conversion, from its file of options. Nothing is searched or
            measured then.

    Raises:
        ValueError: no stages meet the requirements.
    """
    shapes = {name: tuple(node.meta["val"].shape) for name, node in draft.inputs.items()}
    program = fix_rows(draft, micro_batch_of(shapes, options.batch_size))
    planner = _Planner(
        program,
        options,
        MEMORY_PER_IPU if memory_per_ipu is None else memory_per_ipu,
        draft.source_names,
    )
    return planner.plan(solution)


class _Planner:
    """The parts of a plan for one program."""

    def __init__(
        self,
        program: FixedProgram,
        options: ConversionOptions,
        memory_per_ipu: int,
        source_names: frozenset[str],
    ) -> None:
        assert options.pipeline_cfg is not None
        self.program, self.options = program, options
        self.config: PipelineConfig = options.pipeline_cfg
        self.memory_per_ipu, self.source_names = memory_per_ipu, source_names
        self.nodes: StageNodes = stage_nodes(program)
        if not self.nodes.groups:
            raise ValueError("pipeline_cfg: no node is placed on an IPU")
        self.files: dict[Path, bytes] = {}
        self.file_options: dict[Path, str] = {}
        self.warnings: list[str] = []

    @property
    def measures(self) -> bool:
        return not self.config.ipu_model

    def plan(self, kept: Any) -> PipelinePlan:
        """All of it.

        Args:
            kept: a solution of an earlier conversion, or None.
        """
        if kept is not None:
            found, ipus = self._kept(kept)
        elif self.config.converter == "auto":
            found, ipus = self._search()
        else:
            found, ipus = self._given(), self.options.num_ipus
        stages = with_casts(self.program, found.pipeline_mapping)
        devices = found.device_mapping
        placement = replace(
            self.program.placement,
            stages=stages,
            ipus={name: devices[stage] for name, stage in stages.items()},
            device_mapping=devices,
        )
        return PipelinePlan(
            placement,
            ipus,
            found,
            self.files,
            self.file_options,
            MEASURED if self.measures else ESTIMATE,
            tuple(self.warnings),
            measured=self.measures and self.config.converter == "auto",
        )

    def _kept(self, value: Any) -> tuple[Solution, int]:
        """A solution of an earlier conversion, which becomes the solution file again."""
        what, limit = "solution", max(self.options.num_ipus, self.config.max_ipu_quantity)
        found = read_solution(value, what, self.nodes.names, self.source_names, limit)
        check_stages(self.program, found, what)
        if self.config.converter != "load":
            name = "manual.pipeconfig"
            if self.config.converter == "auto":
                name = "greedy_search_solutions.pipeconf"
            self._write_solution(name, found)
        ipus = max(self.options.num_ipus, max(found.device_mapping) + 1)
        return found, ipus if self.config.converter != "auto" else max(found.device_mapping) + 1

    def _given(self) -> Solution:
        """The stages of a file, or of expressions."""
        config, ipus = self.config, self.options.num_ipus
        if config.converter == "load":
            path = Path(config.solution_path)
            what, folder = str(path), "pipeline_loader"
            found = read_solution_file(path, self.nodes.names, self.source_names, ipus)
        else:
            what, folder = "manual_pipeline_config", "manual_pipeline"
            found = manual_stages(config, self.nodes.names, ipus)
        check_stages(self.program, found, what)
        if config.converter == "manual":
            self._write_solution("manual.pipeconfig", found)
        if config.profiling_enable or self.measures:
            work = self._work(timed=self.measures and config.profiling_enable)
            profile = self._profile(work, found, ipus)
            self._check_memory(profile)
            if config.profiling_enable:
                rounded = 1 << (ipus - 1).bit_length()
                name = f"{folder}-{rounded}-b{self.program.micro_batch.size}"
                self._write_profile(name, profile)
        return found

    def _search(self) -> tuple[Solution, int]:
        config = self.config
        check_searchable(self.nodes.groups)
        every = self._work(timed=self.measures)
        identities = {group.name for group in self.nodes.groups if is_identity(group)}
        work = [node for node in every if node.name not in identities]
        limits = Limits(
            self.memory_per_ipu,
            config.priority,
            config.fine_tune_iter,
            config.min_ipu_quantity,
            config.max_ipu_quantity,
        )

        tied = blocks(self.program, work)

        def solution_of(sizes: Sizes) -> Solution:
            stages = (k for k, size in enumerate(sizes) for _ in range(size))
            found = {
                node.name: stage
                for block, stage in zip(tied, stages, strict=True)
                for node in block.nodes
            }
            everywhere = with_all_nodes(self.program, found)
            ordered = {name: everywhere[name] for name in self.nodes.names}
            return Solution(ordered, tuple(range(len(sizes))))

        def watch(count: int, tuning: bool, sizes: Sizes) -> None:
            profile = self._profile(every, solution_of(sizes), count)
            folder = (
                f"auto_pipeline_solver-{count}-b{self.program.micro_batch.size}-{config.priority}"
                + ("-tune" if tuning else "")
            )
            self._write_profile(folder, profile)

        try:
            choice = Search([block.joined() for block in tied], limits, watch).run()
        except ValueError as error:
            raise ValueError(f"{error}{why_tied(tied)}") from error
        found = solution_of(choice.sizes)
        check_stages(self.program, found, "pipeline_cfg with converter 'auto'")
        self._write_solution(choice.file, found)
        return found, len(choice.sizes)

    def _work(self, *, timed: bool) -> list[WorkNode]:
        if timed:
            groups = (*self.nodes.groups, *self.nodes.casts)
            return work_list(self.program, {}, measure_seconds(self.program, groups))
        cycles = estimate_cycles(
            self.program,
            half_matmul_partials=self.options.matmul_partial_type == "half",
            half_conv_partials=self.options.conv_partial_type == "half",
        )
        return work_list(self.program, cycles, None)

    def _profile(self, work: list[WorkNode], found: Solution, ipus: int) -> StageProfile:
        micro_batches = max(1, self.options.batch_per_step) * len(found.device_mapping)
        rows = micro_batches * self.program.micro_batch.size
        return StageProfile(
            work, found, ipus, self.memory_per_ipu, self.measures, micro_batches, rows
        )

    def _check_memory(self, profile: StageProfile) -> None:
        """Warn of an IPU over its memory, or raise where costs are those of this machine."""
        for number, ipu in enumerate(profile.memory()):
            if not ipu.overflow:
                continue
            problem = f"IPU {number} needs {ipu.used} bytes, and has {self.memory_per_ipu}"
            if self.measures:
                raise ValueError(f"pipeline_cfg: {problem}")
            self.warnings.append(f"{problem}: {ipu.overflow} too many")

    def _write_solution(self, name: str, solution: Solution) -> None:
        self._write("solution_dir", name, write_solution(solution))

    def _write_profile(self, folder: str, profile: StageProfile) -> None:
        self._write("profiling_root_dir", f"{folder}/{FILE}", profile.write())

    def _write(self, key: str, name: str, content: bytes) -> None:
        """Let a file be written into the folder that a key of the configuration names."""
        path = Path(os.path.abspath(getattr(self.config, key))) / name
        self.files[path], self.file_options[path] = content, f"pipeline_cfg: {key}"
