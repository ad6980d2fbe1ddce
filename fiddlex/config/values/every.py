"""The type of a field that holds a number of steps or the word `auto`."""

import typing

AUTO = "auto"


class Every(int):
    """A number of steps between two actions; 0: never; `auto`: the run chooses it."""

    is_auto: bool

    def __new__(cls, value: int | str = 0) -> "Every":
        """Makes one from a number, its digits, or `auto`; ValueError for any other text."""
        is_auto = value == AUTO or getattr(value, "is_auto", False)
        every = super().__new__(cls, -1 if is_auto else value)
        every.is_auto = is_auto
        return every

    def __repr__(self) -> str:
        return repr(self.to_json())

    def __str__(self) -> str:
        return str(self.to_json())

    def to_json(self) -> int | str:
        return AUTO if self.is_auto else int(self)


if typing.TYPE_CHECKING:
    EveryField = int | str  # what config files may assign
else:
    EveryField = Every  # what the field then holds (`fiddlex.config.records.Checked`)
