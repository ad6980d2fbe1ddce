"""The type of a field that holds a number of steps or the word `auto`."""

import typing

AUTO = "auto"
_AUTO_NUMBER = -(2**31)  # which nobody gives as a number of steps


class Every(int):
    """A number of steps between two actions; 0: never; `auto`: the run chooses it."""

    def __new__(cls, value: int | str = 0) -> "Every":
        """Makes one from a number, its digits, or `auto`; ValueError for any other text."""
        return super().__new__(cls, _AUTO_NUMBER if value == AUTO else value)

    @property
    def is_auto(self) -> bool:
        return self == _AUTO_NUMBER

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
