"""Take the share of a rank: its IPUs' part of the program, with streams to and from other ranks.

Before   receive %input = host.input  -> ipu0
         (%relu) = call @forward0(%0.weight, %0.bias, %input)  on ipu0
         copy %relu..on1 = %relu: f32[2,4], 32 bytes  ipu0 -> ipu1
         (%addmm_1) = call @forward1(%2.weight, %2.bias, %relu..on1)  on ipu1
         send host.0 = %addmm_1  <- ipu1
After    receive %relu..on1 = wire 2: f32[2,4], 32 bytes for each replica  \\
           from the rank of IPU 0  on ipu1
         (%addmm_1) = call @forward1(%2.weight, %2.bias, %relu..on1)  on ipu1
         send host.0 = %addmm_1  <- ipu1
Keeps    the order of instructions, and their names. `inlined` stays whole, because schedules are
         planned on it. The numbers for traced updates (`UpdateFactors`) are made on every rank, and
         copied there. So each rank knows by itself whether an update was traced for a step.
Source   design of this project: ranks have one program, and each runs its share of it.
"""

from dataclasses import replace

from ipu_dynamo.errors import CompileError
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Decision, GradientNorm, HostProgram, Program
from ipu_dynamo.program.local_program import check_streams, local_program
from ipu_dynamo.program.share import Share


class TakeShare(Pass):
    """The pass. `share`: of the rank."""

    level = "host"
    needed = "a rank runs its own share"

    share: Share = Share(1, 1, 0, 0)

    def __call__(self, host: HostProgram) -> HostProgram:
        assert host.deferred is None
        assert host.fused is None
        share, program = self.share, host.inlined
        if share.rows > 1:
            refuse_norms_of_groups(program)
        columns = [share.of_rank(rank) for rank in share.of_row]
        locals_ = [local_program(program, each) for each in columns]
        check_streams(locals_)
        replicas, ipus = share.replicas(program.replicas), share.ipus(program.num_ipus)
        choice = f"{_some(replicas, 'replica')} and {_some(ipus, 'IPU')}"
        decision = Decision(self.name, choice, f"rank {share.rank} of {share.ranks}")
        return replace(host, share=share, local=locals_[share.column]).deciding(decision)


def refuse_norms_of_groups(program: Program) -> None:
    """Refuse to clip by a norm that no rank can compute alone.

    Raises:
        CompileError: groups of replicas have their own gradients of a parameter.
    """
    grouped = {variable.name for variable in program.variables if variable.groups is not None}
    for norm in program.walk():
        if isinstance(norm, GradientNorm) and not grouped.isdisjoint(norm.parameters):
            name = next(name for name in norm.parameters if name in grouped)
            raise CompileError(
                f"gradients are clipped by a norm that counts those of all groups of %{name}, and "
                "a rank has those of its replicas",
                hint="clip values (ClipGradValue), or leave out the dimension replica of the mesh",
            )


def _some(numbers: range, what: str) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {numbers[0]} to {numbers[-1]}"
