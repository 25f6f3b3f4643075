"""Every environment variable of the transfer, each once (docs/options.md). Pure: no torch, no SGLang.

SGLang's arguments are a closed set, so that a plugin's options are environment variables. They are read once, at start:
a name that is unknown or a value that cannot be is an error, because a typing error must not run the default.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sglang_hetero.discovery.settings import SETTINGS, EtcdOptions, parse_url
from sglang_hetero.errors import OptionError
from sglang_hetero.transfer.pieces import StateMode
from sglang_hetero.transfer.seal import TOKEN_OPTION

PREFIX = "SGLANG_HETERO"
DOCUMENT = "docs/options.md"

DEFAULT_WINDOW = 16
"""Units per request and pipeline stage."""
MAX_WINDOW = 1024
"""Every unit of a window is named in one message."""
MAX_MIB = 1 << 20
MAX_SECONDS = 86_400.0
MIB, KIB = 1 << 20, 1 << 10

ELSEWHERE = {
    "SGLANG_HETERO_CPU_CONV_LAYOUT": "docs/cpu.md",
    "SGLANG_HETERO_REPORTS": "docs/state.md",
    "SGLANG_HETERO_CACHE": "docs/models.md",
    "SGLANG_HETERO_TORCH_INDEX": "docs/setup.md",
    "SGLANG_HETERO_TEST_STOCK": "tests/harness/product.py",
    "SGLANG_HETERO_TEST_LOGS": "tests/serving/conftest.py",
}
"""Variables with our prefix that are no option of the transfer, and where they are described."""


class Mode(StrEnum):
    """Which pairs take our path (pairing.py)."""

    AUTO = "auto"
    ALWAYS = "always"
    OFF = "off"


class Reader(StrEnum):
    """Which side an option is read by."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True)
class Options:
    """What the user chose for this process; None where SGLang's own limits or the model decide."""

    mode: Mode = Mode.AUTO
    state: StateMode = StateMode.PREPUSH
    layerwise: bool = True
    parallel_pull: bool = True
    staging_bytes: int | None = None
    unit_bytes: int | None = None
    window: int = DEFAULT_WINDOW
    window_timeout: float | None = None
    stall_timeout: float | None = None
    verify: bool = False
    trace: str | None = None
    token_file: str | None = None
    etcd_endpoints: tuple[str, ...] | None = None
    etcd_prefix: str | None = None
    etcd_user: str | None = None
    etcd_password_file: str | None = None
    etcd_ca: str | None = None
    etcd_cert: str | None = None
    etcd_key: str | None = None
    etcd_lease: int | None = None
    advertise_url: str | None = None

    @property
    def etcd(self) -> EtcdOptions | None:
        """How etcd is reached; None without discovery. Raises OptionError where the options of etcd do not go together
        or a file cannot be read."""
        return EtcdOptions.of({one.field: getattr(self, f"{_ETCD}{one.field}") for one in SETTINGS})

    def window_seconds(self, bootstrap_timeout: float) -> float:
        """How long a request may wait for units; prefill gives up after `bootstrap_timeout`, and we must come first."""
        return bootstrap_timeout / 2 if self.window_timeout is None else self.window_timeout

    def stall_seconds(self, waiting_timeout: float) -> float:
        """How long a transfer may stand still; `waiting_timeout` is SGLang's own limit for a whole transfer."""
        return waiting_timeout if self.stall_timeout is None else self.stall_timeout


@dataclass(frozen=True)
class Option:
    """One variable.

    field: of Options. parse: from the text to the field's value; raises ValueError. values: those that are allowed, in
    words. default: in words, where it is computed; else the text that stands for it.
    """

    name: str
    field: str
    parse: Callable[[str], object]
    values: str
    default: str
    reader: Reader
    what: str


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _whole(text: str, largest: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= largest:
        raise ValueError(text)
    return value


def _mebibytes(text: str) -> int:
    return _whole(text, MAX_MIB) * MIB


def _kibibytes(text: str) -> int:
    return _whole(text, MAX_MIB * KIB) * KIB


def _units(text: str) -> int:
    return _whole(text, MAX_WINDOW)


def _path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError(text)
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= MAX_SECONDS):
        raise ValueError(text)
    return value


_ETCD = "etcd_"
"""In front of the fields that say how etcd is reached."""
_FLAG = "0 or 1"
_SECONDS = f"seconds, more than 0 and at most {MAX_SECONDS:.0f}"


def _one_of(values: type[StrEnum]) -> str:
    return ", ".join(values)


OPTIONS: tuple[Option, ...] = (
    Option(
        "SGLANG_HETERO",
        "mode",
        Mode,
        _one_of(Mode),
        "auto",
        Reader.BOTH,
        "which pairs take this package's path: those that need it, all, or none",
    ),
    Option(
        "SGLANG_HETERO_STATE",
        "state",
        StateMode,
        _one_of(StateMode),
        "prepush",
        Reader.DECODE,
        "how the linear state comes: written as soon as the last chunk has run through a layer (prepush), at its end "
        "(push), or read by decode (pull)",
    ),
    Option(
        "SGLANG_HETERO_LAYERWISE",
        "layerwise",
        _flag,
        _FLAG,
        "1",
        Reader.PREFILL,
        "send a layer's caches while the layers behind it compute, or everything at the end of each chunk",
    ),
    Option(
        "SGLANG_HETERO_PARALLEL_SHARD_PULL",
        "parallel_pull",
        _flag,
        _FLAG,
        "1",
        Reader.DECODE,
        "with pull: read the shards of all prefill ranks at the same time, or one after the other",
    ),
    Option(
        "SGLANG_HETERO_STAGING_MB",
        "staging_bytes",
        _mebibytes,
        f"MiB, a whole number from 1 to {MAX_MIB}",
        "what the running requests need",
        Reader.DECODE,
        "size of a rank's staging arena",
    ),
    Option(
        "SGLANG_HETERO_UNIT_KB",
        "unit_bytes",
        _kibibytes,
        f"KiB, a whole number from 1 to {MAX_MIB * KIB}",
        "what the model's largest piece needs",
        Reader.DECODE,
        "size of one unit of the arena",
    ),
    Option(
        "SGLANG_HETERO_WINDOW",
        "window",
        _units,
        f"units, a whole number from 1 to {MAX_WINDOW}",
        str(DEFAULT_WINDOW),
        Reader.DECODE,
        "units that a request has per pipeline stage of prefill",
    ),
    Option(
        "SGLANG_HETERO_WINDOW_TIMEOUT",
        "window_timeout",
        _seconds,
        _SECONDS,
        "half of SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        Reader.DECODE,
        "how long a request may wait for units before it fails",
    ),
    Option(
        "SGLANG_HETERO_STALL_TIMEOUT",
        "stall_timeout",
        _seconds,
        _SECONDS,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        Reader.BOTH,
        "how long a transfer may stand still before it fails",
    ),
    Option(
        "SGLANG_HETERO_VERIFY",
        "verify",
        _flag,
        _FLAG,
        "0",
        Reader.DECODE,
        "compare digests of what was sent and what arrived; slow, for finding faults",
    ),
    Option(
        "SGLANG_HETERO_TRACE",
        "trace",
        _path,
        "a folder, made if it is not there",
        "none",
        Reader.BOTH,
        "write what each rank does and when, for sglang-hetero trace (docs/perf.md)",
    ),
    Option(
        TOKEN_OPTION,
        "token_file",
        _path,
        "a file that only its owner, or its group, can read; 32 to 4096 bytes",
        "none",
        Reader.BOTH,
        "take messages only from peers that have the same token (docs/security.md)",
    ),
    *(
        Option(one.variable, f"{_ETCD}{one.field}", one.parse, one.values, one.default, Reader.BOTH, one.what)
        for one in SETTINGS
    ),
    Option(
        "SGLANG_HETERO_ADVERTISE_URL",
        "advertise_url",
        parse_url,
        "a URL like http://10.0.0.7:30000",
        "from --host and --port; with 0.0.0.0 the address of the network interface",
        Reader.BOTH,
        "where routers reach this server, as it says in etcd and on /hetero/instance",
    ),
)

NAMES = frozenset(option.name for option in OPTIONS)


def read(environ: Mapping[str, str]) -> Options:
    """The options of this process. Raises OptionError for an unknown variable with our prefix and for a bad value."""
    for name in sorted(environ):
        if (name == PREFIX or name.startswith(f"{PREFIX}_")) and name not in NAMES and name not in ELSEWHERE:
            raise OptionError(f"{name}={environ[name]!r}: no such option{_near(name)}; {DOCUMENT} lists them all")
    given: dict[str, object] = {}
    for option in OPTIONS:
        text = environ.get(option.name)
        if text is None:
            continue
        try:
            given[option.field] = option.parse(text)
        except (ValueError, KeyError):
            raise OptionError(f"{option.name}={text!r}: must be {option.values} ({DOCUMENT})") from None
    return Options(**given)  # type: ignore[arg-type]  # the table says which type goes to which field


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, sorted(NAMES), n=1)
    return f"; is {near[0]} meant?" if near else ""
