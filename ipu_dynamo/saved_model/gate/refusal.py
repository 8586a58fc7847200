"""Say which member of a file is refused, why, and whether trusting the file would help."""


class Refusal(ValueError):
    """A part of a file is more than data, or damaged; nothing of the file was run.

    Args:
        problem: one clause with the content found.
        trusting: whether a user who trusts the file can load it all the same.
    """

    def __init__(self, problem: str, *, trusting: bool = True) -> None:
        self.problem, self.trusting = problem, trusting
        super().__init__(problem)

    def of(self, member: str) -> "Refusal":
        """The same, with the member that it is about in front."""
        return Refusal(f"{member}: {self.problem}", trusting=self.trusting)

    def __str__(self) -> str:
        hint = "; if you trust whoever wrote the file: --trust, trust=True or IPU_DYNAMO_TRUST=1"
        return f"{self.problem}{hint}" if self.trusting else self.problem


def damaged(problem: str) -> Refusal:
    """A refusal of damaged data, for which trusting the file does not help."""
    return Refusal(f"damaged: {problem}", trusting=False)
