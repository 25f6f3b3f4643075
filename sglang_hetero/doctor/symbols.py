"""The touched symbols of one release of SGLang, beside what is recorded of it; of one that this package does not serve,
beside those of the release that it is made for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import msgspec

from sglang_hetero.backend.selfcheck import misfit
from sglang_hetero.errors import UpstreamChanged
from sglang_hetero.releases import MADE_FOR
from sglang_hetero.releases import Release as Served

from .lines import Line, Status, fail, ok, warn
from .source import Found, NotFound, Release
from .upstream import Purpose, Use

AREA = "symbols"
INSTALL = f"install SGLang {MADE_FOR.number}"
REMEDY = f"{INSTALL}, or change this package where the list says"


class Entry(msgspec.Struct, frozen=True):
    """What is recorded of a symbol: signature as `source.Found` tells it, digest of its source."""

    signature: str
    digest: str


class Record(msgspec.Struct, frozen=True):
    """All symbols of one release, by name."""

    release: str
    symbols: dict[str, Entry]


@dataclass(frozen=True)
class Change:
    """What is different in a symbol. status: `fail` where this package cannot go on as it is, `warn` where somebody has
    to look. what: in words."""

    use: Use
    status: Status
    what: str

    def __str__(self) -> str:
        return f"{self.use.name}: {self.what} (used in {', '.join(self.use.where)})"


def record_of(release: Release, uses: Iterable[Use]) -> Record:
    """What is to be recorded of a release. Raises NotFound for a symbol that it has not."""
    found = {use.name: release.find(use.symbol.module, use.symbol.name) for use in uses if not use.absent}
    return Record(release.version, {name: Entry(one.signature, one.digest) for name, one in found.items()})


def encode(record: Record) -> bytes:
    """The record as it stands in its file."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n"


def record_name(served: Served) -> str:
    """The file with the record of a release that this package serves."""
    return f"sglang-{served.number}.json"


def recorded(served: Served = MADE_FOR) -> Record:
    """What is recorded of a release that this package serves."""
    data = resources.files("sglang_hetero.doctor").joinpath(record_name(served)).read_bytes()
    return msgspec.json.decode(data, type=Record)


def changes(release: Release, uses: Iterable[Use], symbols: Mapping[str, Entry]) -> list[Change]:
    """Every difference, in the order of the uses. symbols: what is recorded of them."""
    return [change for use in uses if (change := _change(release, use, symbols.get(use.name))) is not None]


def _change(release: Release, use: Use, known: Entry | None) -> Change | None:
    symbol = use.symbol
    try:
        found = release.find(symbol.module, symbol.name)
    except NotFound as error:
        return None if use.absent else Change(use, Status.FAIL, f"missing: {error}")
    if (broken := _broken(use, found)) is not None:
        return Change(use, Status.FAIL, broken)
    if known is None:
        raise UpstreamChanged(
            f"{use.name} is not recorded; record it: python -m sglang_hetero.doctor.record (docs/versions.md)"
        )
    different = ""
    if found.signature != known.signature:
        different = f"was {known.signature}, is {found.signature}"
    elif found.digest != known.digest:
        different = "the signature is the same, the body is not: read it"
    return Change(use, Status.WARN, different) if different else None


def _broken(use: Use, found: Found) -> str | None:
    """Why this package cannot use what is there; None if it can. The rules are those of the self-check."""
    symbol, problem = use.symbol, None
    if use.absent:
        return "is there now, and this package would replace it"
    if symbol.parameters is not None:
        if found.parameters is None:
            return f"is no function any more, but {found.signature}"
        problem = misfit(symbol, found.parameters)
    if problem is None and symbol.digest is not None and found.digest != symbol.digest:
        return "does something else now, and what it does is relied on"
    return None if problem is None else problem.removeprefix(f"{symbol} ")


def lines(release: Release, served: Served, found: Sequence[Change], total: int, *, cpu: bool) -> list[Line]:
    """What is printed. served: with which it was compared. total: symbols looked at. cpu: whether this is the CPU
    reference platform; where it is not, what only that needs does not fail."""
    made = [_version(release.version, served)]
    same = total - len(found)
    said = f"{same} of {total} are as in {served.number}"
    bad = [change for change in found if change.status is Status.FAIL]
    made.append(
        warn(AREA, "touched", said, "see what a new release needs, below") if found else ok(AREA, "touched", said)
    )
    for change in bad:
        soft = change.use.purpose is Purpose.CPU and not cpu
        make = warn if soft else fail
        made.append(make(AREA, change.use.name, f"{change.what}; used in {', '.join(change.use.where)}", REMEDY))
    return made


def _version(version: str, served: Served) -> Line:
    if version == MADE_FOR.number:
        return ok(AREA, "release", f"SGLang {version}")
    if version == served.number:
        return warn(AREA, "release", served.ran, INSTALL)
    return warn(AREA, "release", f"SGLang {version or 'of unknown release'}, not {MADE_FOR.number}", INSTALL)


def needs(found: Sequence[Change]) -> list[str]:
    """What a release with these differences needs of this package: what is broken first, then what is to be read."""
    titles = {Status.FAIL: "to change", Status.WARN: "to look at"}
    return [f"{title}: {change}" for status, title in titles.items() for change in found if change.status is status]
