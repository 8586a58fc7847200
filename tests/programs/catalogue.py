"""List all public programs that are run, by name."""

from tests.programs import applications, guide, independent, tutorials

PROGRAMS = {
    program.name: program
    for programs in (
        guide.PROGRAMS,
        tutorials.PROGRAMS,
        independent.PROGRAMS,
        applications.PROGRAMS,
    )
    for program in programs
}
