"""How etcd is reached: values that go together, and those that do not."""

import argparse

import pytest

from sglang_hetero.backend.options import read
from sglang_hetero.discovery.settings import DEFAULT_PREFIX, SETTINGS, EtcdOptions, add_flags, of_flags
from sglang_hetero.errors import OptionError


@pytest.fixture
def files(tmp_path):
    for name in ("word", "ca", "cert", "key"):
        (tmp_path / name).write_text("secret")
        (tmp_path / name).chmod(0o600)
    return {name: str(tmp_path / name) for name in ("word", "ca", "cert", "key")}


def parsed(*given, environ=()):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return of_flags(parser.parse_args(given), dict(environ))


def test_without_etcd_there_is_no_discovery():
    assert EtcdOptions.of({}) is None
    assert read({}).etcd is None
    assert parsed() is None


def test_a_server_and_a_command_read_the_same(files):
    environ = {
        "SGLANG_HETERO_ETCD": "10.0.0.5:2379, etcd.example:2379",
        "SGLANG_HETERO_ETCD_PREFIX": "/team/fleet-2",
        "SGLANG_HETERO_ETCD_USER": "router",
        "SGLANG_HETERO_ETCD_PASSWORD_FILE": files["word"],
        "SGLANG_HETERO_ETCD_CA": files["ca"],
        "SGLANG_HETERO_ETCD_CERT": files["cert"],
        "SGLANG_HETERO_ETCD_KEY": files["key"],
        "SGLANG_HETERO_ETCD_LEASE": "60",
    }
    assert set(environ) == {one.variable for one in SETTINGS}, "every setting must be tried"
    found = read(environ).etcd
    assert found == EtcdOptions(
        endpoints=("https://10.0.0.5:2379", "https://etcd.example:2379"),
        prefix="/team/fleet-2",
        user="router",
        password_file=files["word"],
        ca=files["ca"],
        cert=files["cert"],
        key=files["key"],
        lease=60,
    )
    assert found.secure and found.password() == "secret"
    assert parsed(environ=environ.items()) == found
    flags = [part for one in SETTINGS if one.flag for part in (one.flag, environ[one.variable])]
    assert parsed(*flags, environ=[("SGLANG_HETERO_ETCD_LEASE", "60")]) == found


def test_a_flag_goes_before_the_environment():
    found = parsed("--etcd", "a:1", environ=[("SGLANG_HETERO_ETCD", "b:2"), ("SGLANG_HETERO_ETCD_PREFIX", "/x")])
    assert found == EtcdOptions(endpoints=("http://a:1",), prefix="/x")


@pytest.mark.parametrize(
    ("endpoints", "certified", "found"),
    [
        (("a:1",), False, ("http://a:1",)),
        (("a:1",), True, ("https://a:1",)),
        (("https://a:1",), False, ("https://a:1",)),
        (("https://a:1", "b:2"), True, ("https://a:1", "https://b:2")),
        (("[::1]:1",), False, ("http://[::1]:1",)),
    ],
)
def test_tls_follows_from_the_certificates_or_is_said(endpoints, certified, found, files):
    given = EtcdOptions.of({"endpoints": endpoints, "ca": files["ca"] if certified else None})
    assert given.endpoints == found and given.prefix == DEFAULT_PREFIX


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"endpoints": None, "prefix": "/a"}, "SGLANG_HETERO_ETCD_PREFIX is set, but not SGLANG_HETERO_ETCD "),
        ({"user": "a"}, "give both, or neither"),
        ({"cert": "cert"}, "SGLANG_HETERO_ETCD_CERT and SGLANG_HETERO_ETCD_KEY go together"),
        ({"endpoints": ("http://a:1", "https://b:1")}, "all of them with TLS, or none"),
        ({"endpoints": ("http://a:1",), "ca": "ca"}, "takes no certificates"),
        ({"ca": "gone"}, "SGLANG_HETERO_ETCD_CA='.*gone': No such file"),
        ({"user": "a", "password_file": "gone"}, "PASSWORD_FILE='.*gone': No such file"),
        ({"user": "a", "password_file": "open"}, "chmod 600"),
        ({"user": "a", "password_file": "empty"}, "0 bytes"),
        ({"user": "a", "password_file": "bytes"}, "no UTF-8"),
    ],
)
def test_what_does_not_go_together_is_said(fields, says, files, tmp_path):
    for name, data, mode in (("open", b"x", 0o644), ("empty", b"\n", 0o600), ("bytes", b"\xff", 0o600)):
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(mode)
    paths = ("ca", "cert", "key", "password_file")
    given = {name: str(tmp_path / value) if name in paths else value for name, value in fields.items()}
    with pytest.raises(OptionError, match=says):
        EtcdOptions.of({"endpoints": ("a:1",), **given})


@pytest.mark.parametrize("text", ["a:1/x", "a", "", ",", "a:0", "a:1,a:1", "ftp://a:1", "u@a:1", "a:1?x", "a b:1"])
def test_a_wrong_flag_is_named_with_what_is_allowed(text):
    with pytest.raises(OptionError, match=r"^--etcd=.*: must be host:port"):
        parsed("--etcd", text)


def test_a_wrong_variable_of_a_command_is_named():
    with pytest.raises(OptionError, match=r"^SGLANG_HETERO_ETCD_PREFIX='/a/': must be"):
        parsed("--etcd", "a:1", environ=[("SGLANG_HETERO_ETCD_PREFIX", "/a/")])
