"""What a mutation is: one wrong change to fiddlex, and the tests that must fail because of it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A piece of text to replace.

    Attributes:
      name: the resulting defect, in words joined by hyphens.
      file: path in the repository.
      old: text that occurs exactly once in the file.
      new: text to put in its place.
      tests: files or node ids of pytest, of which at least one test must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The text of the file, mutated.

        Raises:
          ValueError: when `old` does not occur in it exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"mutation {self.name}: its text occurs {count} times in {self.file}, and must occur once. "
                f"Adapt the mutation to the file. The text is {self.old!r}."
            )
        return text.replace(self.old, self.new)
