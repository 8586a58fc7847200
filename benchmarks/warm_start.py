"""Time the first training step of a fresh process, without and with the code of an earlier one.

Usage: python -m benchmarks.warm_start [DOOR ...]

The time runs from the start of the process to the end of its first step, less `import torch`.
Seconds of the processor are in brackets. `program_cache` is compared with a process that imports
the package and traces the model once; its line shows the passes and processes of the warm start.
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.child import Child
from benchmarks.measure import Figures

DOORS = {
    "compile_training": "this",
    "torch.compile": "torch.compile",
    "program_cache": "kept program",
}
_PROCESSES = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")  # audit events


def main() -> None:
    """Print the times for the doors named on the command line, or all."""
    for door in sys.argv[1:] or DOORS:
        with tempfile.TemporaryDirectory() as name:
            cold = _fresh_process(Path(name), door)
            warm = min((_fresh_process(Path(name), door) for _ in range(2)), key=_cpu)
            traced = _fresh_process(Path(name), "trace") if door == "program_cache" else None
        print(
            f"{door:<17} cold {cold['seconds']:6.1f} s ({_cpu(cold):.1f} s)   "
            f"warm {warm['seconds']:5.1f} s ({_cpu(warm):.2f} s)   "
            f"{cold['seconds'] / warm['seconds']:4.1f} times"
        )
        if traced is not None:
            print(
                f"{'':<17} {_cpu(warm) / _cpu(traced):.2f} times a process that imports and traces "
                f"({_cpu(traced):.2f} s); {warm['passes']} passes, "
                f"{warm['processes']} processes started"
            )


def _cpu(figures: Figures) -> float:
    return figures["cpu"]


def _fresh_process(folder: Path, work: str) -> Figures:
    """The figures of a process that makes the first step of a door, or traces only ("trace")."""
    started = time.time()
    with Child(folder, IPU_DYNAMO_ENGINE="inductor") as child:
        figures: Figures = child.call("benchmarks.warm_start:counted_step", work, started)
    return figures


def counted_step(work: str, started: float) -> Figures:
    """Make the first step of a small decoder of the GPT-2 kind in this process, or trace it.

    Args:
        work: a name of `DOORS`; "trace": the model is traced, and no step is made.
        started: when this process was started, in seconds of `time.time`.

    Returns:
        Seconds on the clock, and of the processor with children; passes that ran; processes that
        it started.
    """
    processes: list[str] = []
    sys.addaudithook(lambda event, _: processes.append(event) if event in _PROCESSES else None)
    before, cpu = time.perf_counter(), time.process_time()
    import torch  # noqa: F401  not counted

    importing, cpu_of_import = time.perf_counter() - before, time.process_time() - cpu
    from benchmarks.first_step import cpu_seconds, first_step

    passes = _count_passes()
    if work == "trace":
        _end_after_tracing()
    with contextlib.suppress(_TracedError):
        first_step("decoder", DOORS.get(work, "kept program"))
    return {
        "seconds": time.time() - started - importing,
        "cpu": cpu_seconds() - cpu_of_import,
        "passes": len(passes),
        "processes": len(processes),
    }


class _TracedError(Exception):
    """The model is traced."""


def _end_after_tracing() -> None:
    """Let a compilation end when its model is traced."""
    from ipu_dynamo.whole_step import compile_model

    trace = compile_model.trace

    def only(*args, **kwargs):  # type: ignore[no-untyped-def]
        trace(*args, **kwargs)
        raise _TracedError

    compile_model.trace = only  # type: ignore[attr-defined]


def _count_passes() -> list[str]:
    """Names of the passes that run from now on."""
    from ipu_dynamo.passes.manager import PassManager

    run, names = PassManager.run, []

    def counted(self, passes, level):  # type: ignore[no-untyped-def]
        names.extend(step.name for step in passes)
        return run(self, passes, level)

    PassManager.run = counted  # type: ignore[method-assign]
    return names


if __name__ == "__main__":
    main()
