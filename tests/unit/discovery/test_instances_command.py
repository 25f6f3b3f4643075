"""`sglang-hetero instances`."""

import json

import pytest

from sglang_hetero import cli
from sglang_hetero.discovery.etcd import Etcd
from sglang_hetero.discovery.members import key_of
from sglang_hetero.discovery.record import Instance, decode, encode
from sglang_hetero.layout.manifest import Side
from tests.unit.discovery.etcd_server import free_port
from tests.unit.discovery.servers import decode_server, prefill_server


@pytest.fixture
def run(shared_etcd, capsys, monkeypatch):
    for one in ("", "_PREFIX", "_USER", "_PASSWORD_FILE", "_CA", "_CERT", "_KEY", "_LEASE"):
        monkeypatch.delenv(f"SGLANG_HETERO_ETCD{one}", raising=False)

    def run(*arguments, etcd=shared_etcd.address):
        status = cli.main(["instances", *(["--etcd", etcd] if etcd else []), "--etcd-prefix", "/fleet", *arguments])
        done = capsys.readouterr()
        return status, done.out.splitlines(), done.err.splitlines()

    return run


@pytest.fixture
def put(shared_etcd):
    one = Etcd(shared_etcd.options())
    lease = one.grant(3600)
    yield lambda key, data: one.put(key, data, lease)
    one.close()


def test_a_table_of_who_is_there(run, put):
    there = [
        decode_server(),
        prefill_server(model="a model", requests=0),
        Instance(role=Side.PREFILL, url="http://b:1", incarnation="x" * 32),
    ]
    for one in there:
        put(key_of("/fleet", one), encode(one))
    put(key_of("/other", decode_server(url="http://c:1")), encode(decode_server(url="http://c:1")))
    status, out, err = run()
    assert (status, err) == (0, [])
    assert [line.split("  ")[0].strip() for line in out] == ["role", "decode", "prefill", "prefill"]
    assert out[0].split() == [
        *("role", "url", "bootstrap", "model", "tp", "dp", "pp"),
        *("layout", "requests", "tokens", "release", "incarnation"),
    ]
    assert out[1].split() == [
        *("decode", "http://10.0.0.8:30000", "-", "Qwen3.5", "2", "1", "1"),
        *("f" * 8, "16", "4096", "0.1.0", "first"),
    ]
    assert "8998" in out[2] and " a model " in out[2]
    assert out[3].split() == ["prefill", "http://b:1", *["-"] * 9, "x" * 8]
    starts = {line.index(cell) for line, cell in zip(out, ["layout", "f" * 8, "f" * 8], strict=False)}
    assert len(starts) == 1


def test_json_is_the_records(run, put):
    put(key_of("/fleet", decode_server()), encode(decode_server()))
    status, out, _ = run("--json")
    assert status == 0 and [decode(line.encode()) for line in out] == [decode_server()]
    assert json.loads(out[0])["version"] == 1


def test_what_cannot_be_read_is_named(run, put):
    put(key_of("/fleet", decode_server()), encode(decode_server()))
    put("/fleet/decode/\u202e", b"{}")
    status, out, err = run()
    assert status == 1 and len(out) == 2
    assert err[0].startswith("left out: /fleet/decode/\\u202e: a record has version 0")


def test_nobody_is_said_to_be_there(run):
    status, out, err = run()
    assert (status, out) == (1, [])
    assert "no server has registered under /fleet/ in etcd at http://127.0.0.1" in err[0]


def test_no_etcd_at_all(run, capsys):
    assert cli.main(["instances"]) == 1
    assert "which etcd? Give --etcd host:port" in capsys.readouterr().err
    status, _, err = run(etcd=f"127.0.0.1:{free_port()}")
    assert status == 1 and "etcd cannot be read" in err[0] and "is it running there?" in err[0]
