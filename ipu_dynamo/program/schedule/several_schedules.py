"""Compare schedules in one picture."""

from collections.abc import Mapping

from ipu_dynamo.program.schedule.drawing import draw_several
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.svg_picture import Picture


def draw_schedules(schedules: Mapping[str, object]) -> Picture:
    """Draw schedules on one time axis.

    Each has its share of idle time. Each IPU has the colours of its stages, and for each stage the
    stash: of how many micro-batches it keeps values at once. Times are those of `Schedule.timed`.

    Args:
        schedules: by title: a `Schedule`, or an object that has one as its `schedule`, such as a
            compiled model.

    Returns:
        The text of an SVG picture. A notebook shows it as a picture. Its `dark()` is the same for
        a dark page.

    Raises:
        TypeError: something is no schedule and has none.
        ValueError: there is nothing to draw.
    """
    if not isinstance(schedules, Mapping):
        raise TypeError(
            f"draw_schedules takes schedules by title, as {{'mine': step}}, and not a "
            f"{type(schedules).__name__}"
        )
    if not schedules:
        raise ValueError("draw_schedules takes schedules by title, and was given none")
    by_title = {}
    for title, what in schedules.items():
        schedule = getattr(what, "schedule", what)
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"draw_schedules cannot draw {title!r}, a {type(what).__name__}; give the step of "
                "compile_training, or its `schedule`"
            )
        by_title[str(title)] = schedule
    return draw_several(by_title)
