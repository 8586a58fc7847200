"""Look at an installation, section by section: say whether programs can run, and what to do.

Each section asks the code that programs meet: its choices, its errors and its warnings.
"""

from collections.abc import Callable, Iterator, Sequence

from ipu_dynamo.command.findings import Finding, Problem
from ipu_dynamo.command.installation import environment, packages, poptorch_package, pytorch

Section = tuple[str, Callable[[], Iterator[Finding]]]
_FIRST: tuple[Section, ...] = (("versions", packages), ("PyTorch", pytorch))


def doctor() -> int:
    """Print the findings. The result is 0 if programs can run, else 1."""
    problems = _shown(_FIRST)
    if not any(problem.stops for problem in problems):
        from ipu_dynamo.command import machinery  # needs a PyTorch of these versions

        sections = (
            ("environment variables", environment),
            ("poptorch", poptorch_package),
            ("engine", machinery.engine),
            ("caches", machinery.caches),
            ("C++ compiler", machinery.compiler),
            ("CUDA", machinery.cuda),
            ("a program", machinery.program),
        )
        problems += _shown(sections)
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "no problem"
    if any(problem.stops for problem in problems):
        print(f"programs cannot run: {count}")
        return 1
    print(f"programs run{machinery.how_they_run()}: {count}")
    return 0


def _shown(sections: Sequence[Section]) -> list[Problem]:
    """Print what sections find; return the problems, each text once."""
    problems: dict[str, Problem] = {}
    for title, look in sections:
        print(title)
        for finding in look():
            if isinstance(finding, str):
                print(f"  {finding}", flush=True)
                continue
            if finding.text in problems:
                print("  the same problem as above", flush=True)
            else:
                print(finding, flush=True)
            if finding.stops or finding.text not in problems:
                problems[finding.text] = finding
    return list(problems.values())
