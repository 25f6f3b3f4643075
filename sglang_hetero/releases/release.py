"""What one release of SGLang has in place of what the tables of this package name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_hetero.errors import UpstreamChanged

from .symbol import Symbol


@dataclass(frozen=True)
class Instead:
    """What takes the place of a row of the tables. row: None where nothing has to. why: as docs/versions.md says it."""

    row: Symbol | None
    why: str


@dataclass(frozen=True)
class Attribute:
    """One that this package reads from a class of SGLang, and that an older release has not.

    value: what it stands for there. why: as docs/versions.md says it.
    """

    module: str
    owner: str
    name: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.module}.{self.owner}.{self.name}"


@dataclass(frozen=True)
class Release:
    """number: as SGLang tells it. ran: what of this package has been run on it, in words; empty for the release that
    the tables are made for, on which all of it runs.

    instead: by the name of a row of the tables what takes its place.
    """

    number: str
    ran: str = ""
    instead: Mapping[str, Instead] = field(default_factory=dict)
    attributes: tuple[Attribute, ...] = ()

    def rows(self, symbols: Iterable[Symbol]) -> tuple[Symbol, ...]:
        """The rows of a table as they are for this release."""
        found = (self.instead[str(row)].row if str(row) in self.instead else row for row in symbols)
        return tuple(row for row in found if row is not None)

    def has(self, name: str) -> bool:
        """Whether a row of the tables, by its name, counts for this release."""
        return name not in self.instead or self.instead[name].row is not None

    def complete(self) -> None:
        """Give SGLang's classes the attributes that they lack; a second time nothing happens.

        Raises UpstreamChanged, with nothing changed, if a class is missing or has another value already.
        """
        owners = [self._owner(attribute) for attribute in self.attributes]
        for owner, attribute in zip(owners, self.attributes, strict=True):
            setattr(owner, attribute.name, attribute.value)

    @property
    def _this(self) -> str:
        return f"this SGLang {self.number}"

    @property
    def _remedy(self) -> str:
        return f"install SGLang {self.number} as released"

    def _owner(self, attribute: Attribute) -> Any:
        try:
            owner = getattr(importlib.import_module(attribute.module), attribute.owner)
        except (ImportError, AttributeError) as error:
            raise UpstreamChanged(f"{attribute} has no place in {self._this} ({error}); {self._remedy}") from error
        found = getattr(owner, attribute.name, attribute.value)
        if found != attribute.value:
            raise UpstreamChanged(
                f"{attribute} is {found!r} in {self._this}; as released it has none, and this package adds "
                f"{attribute.value!r}; {self._remedy}"
            )
        return owner
