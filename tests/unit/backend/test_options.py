"""Environment variables of the transfer: every value that is allowed, and what is said of every other one."""

import pytest

from sglang_hetero.backend import options
from sglang_hetero.backend.options import ELSEWHERE, OPTIONS, Mode, Options, read
from sglang_hetero.errors import OptionError
from sglang_hetero.transfer.pieces import StateMode

ALLOWED = [
    ("SGLANG_HETERO", "always", "mode", Mode.ALWAYS),
    ("SGLANG_HETERO", "off", "mode", Mode.OFF),
    ("SGLANG_HETERO_STATE", "push", "state", StateMode.PUSH),
    ("SGLANG_HETERO_STATE", "pull", "state", StateMode.PULL),
    ("SGLANG_HETERO_PARALLEL_SHARD_PULL", "0", "parallel_pull", False),
    ("SGLANG_HETERO_STAGING_MB", "64", "staging_bytes", 64 * 2**20),
    ("SGLANG_HETERO_UNIT_KB", "4", "unit_bytes", 4096),
    ("SGLANG_HETERO_WINDOW", "1", "window", 1),
    ("SGLANG_HETERO_WINDOW", "1024", "window", 1024),
    ("SGLANG_HETERO_WINDOW_TIMEOUT", "0.5", "window_timeout", 0.5),
    ("SGLANG_HETERO_STALL_TIMEOUT", "30", "stall_timeout", 30.0),
    ("SGLANG_HETERO_VERIFY", "1", "verify", True),
    ("SGLANG_HETERO_LAYERWISE", "0", "layerwise", False),
    ("SGLANG_HETERO_TRACE", "out/trace", "trace", "out/trace"),
    ("SGLANG_HETERO_TOKEN_FILE", "etc/token", "token_file", "etc/token"),
    ("SGLANG_HETERO_ETCD", "10.0.0.5:2379,https://[::1]:1", "etcd_endpoints", ("10.0.0.5:2379", "https://[::1]:1")),
    ("SGLANG_HETERO_ETCD_PREFIX", "/team/fleet_2", "etcd_prefix", "/team/fleet_2"),
    ("SGLANG_HETERO_ETCD_USER", "a user", "etcd_user", "a user"),
    ("SGLANG_HETERO_ETCD_PASSWORD_FILE", "etc/word", "etcd_password_file", "etc/word"),
    ("SGLANG_HETERO_ETCD_CA", "etc/ca.pem", "etcd_ca", "etc/ca.pem"),
    ("SGLANG_HETERO_ETCD_CERT", "etc/cert.pem", "etcd_cert", "etc/cert.pem"),
    ("SGLANG_HETERO_ETCD_KEY", "etc/key.pem", "etcd_key", "etc/key.pem"),
    ("SGLANG_HETERO_ETCD_LEASE", "3", "etcd_lease", 3),
    ("SGLANG_HETERO_ETCD_LEASE", "3600", "etcd_lease", 3600),
    ("SGLANG_HETERO_ADVERTISE_URL", "HTTP://Gate:1/", "advertise_url", "http://gate:1"),
]

REFUSED = [
    ("SGLANG_HETERO", ["", "Always", "1", "auto "]),
    ("SGLANG_HETERO_STATE", ["", "PUSH", "none"]),
    ("SGLANG_HETERO_PARALLEL_SHARD_PULL", ["", "2", "true", "01"]),
    ("SGLANG_HETERO_VERIFY", ["", "yes"]),
    ("SGLANG_HETERO_LAYERWISE", ["", "2", "off"]),
    ("SGLANG_HETERO_STAGING_MB", ["", "0", "-1", "1.5", "1e3", "64MB", " 64", "1_0", "\u0664", "1048577"]),
    ("SGLANG_HETERO_UNIT_KB", ["0", "x", "1073741825"]),
    ("SGLANG_HETERO_WINDOW", ["0", "1025"]),
    ("SGLANG_HETERO_WINDOW_TIMEOUT", ["", "0", "-1", "nan", "inf", "86401", "5s"]),
    ("SGLANG_HETERO_STALL_TIMEOUT", ["0", "-inf"]),
    ("SGLANG_HETERO_TRACE", ["", " ", "a\0b"]),
    ("SGLANG_HETERO_TOKEN_FILE", ["", " ", "a\0b"]),
    (
        "SGLANG_HETERO_ETCD",
        ["", "etcd", "etcd:2379/v3", "a:1,", "a:1,a:1", "a:0", "u@a:1", ",".join(f"a:{n}" for n in range(1, 18))],
    ),
    ("SGLANG_HETERO_ETCD_PREFIX", ["", "/", "fleet", "/fleet/", "/a//b", "/a b", "/a\n", "/" + "a" * 200]),
    ("SGLANG_HETERO_ETCD_USER", ["", "a\nb", "a" * 257]),
    ("SGLANG_HETERO_ETCD_PASSWORD_FILE", ["", " ", "a\0b"]),
    ("SGLANG_HETERO_ETCD_CA", ["", " ", "a\0b"]),
    ("SGLANG_HETERO_ETCD_CERT", ["", "a\0b"]),
    ("SGLANG_HETERO_ETCD_KEY", ["", "a\0b"]),
    ("SGLANG_HETERO_ETCD_LEASE", ["", "2", "3601", "1.5", "15s"]),
    ("SGLANG_HETERO_ADVERTISE_URL", ["", "10.0.0.7:30000", "http://", "http://a?x", "ftp://a", "http://u@a"]),
]


@pytest.mark.parametrize(("name", "text", "field", "value"), ALLOWED)
def test_a_value_reaches_its_field_and_no_other(name, text, field, value):
    found = read({name: text, "PATH": "/bin"})
    assert getattr(found, field) == value
    assert type(getattr(found, field)) is type(value)
    changed = {key for key in vars(Options()) if getattr(found, key) != getattr(Options(), key)}
    assert changed == {field}


def test_every_option_is_tried_above():
    names = {option.name for option in OPTIONS}
    assert names == {name for name, *_ in ALLOWED} == {name for name, _ in REFUSED}
    assert {option.field for option in OPTIONS} == set(vars(Options()))


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in REFUSED for text in texts])
def test_a_wrong_value_is_named_with_those_that_are_allowed(name, text):
    values = next(option.values for option in OPTIONS if option.name == name)
    with pytest.raises(OptionError) as error:
        read({name: text})
    assert str(error.value).startswith(f"{name}={text!r}: must be {values}")


def test_defaults_in_words_are_the_defaults():
    """Where the table gives a text and no description, it stands for the default."""
    for option in OPTIONS:
        default = getattr(Options(), option.field)
        if default is not None:
            assert option.parse(option.default) == default, option.name


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("SGLANG_HETERO_WINDWO", "; is SGLANG_HETERO_WINDOW meant?"),
        ("SGLANG_HETERO_VERIFY_ALL", "; is SGLANG_HETERO_VERIFY meant?"),
        ("SGLANG_HETERO_", ""),
    ],
)
def test_an_unknown_variable_is_refused(name, guess):
    with pytest.raises(OptionError, match=r"docs/options\.md") as error:
        read({name: "1"})
    assert str(error.value).startswith(f"{name}='1': no such option")
    assert guess in str(error.value)


@pytest.mark.parametrize("name", ["SGLANG_HETEROGENEOUS", "SGLANG_HOST_IP", "sglang_hetero_window", *ELSEWHERE])
def test_other_variables_are_left_alone(name):
    assert read({name: "anything"}) == Options()


def test_limits_of_sglang_are_the_defaults_of_ours():
    assert read({}).window_seconds(300) == 150
    assert read({"SGLANG_HETERO_WINDOW_TIMEOUT": "7"}).window_seconds(300) == 7
    assert read({}).stall_seconds(300) == 300
    assert read({"SGLANG_HETERO_STALL_TIMEOUT": "7"}).stall_seconds(300) == 7


def test_a_limit_of_the_window_fits_a_message():
    assert options.DEFAULT_WINDOW <= options.MAX_WINDOW
