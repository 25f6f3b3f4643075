"""The hand-shake with running servers, and with one that is only described, in words."""

import http.server
import json
import threading

import msgspec
import pytest
from msgspec.structs import replace

from sglang_hetero import cli, releases
from sglang_hetero.discovery.record import Description, encode_description
from sglang_hetero.doctor import local, peers
from sglang_hetero.doctor.lines import Status
from sglang_hetero.errors import OptionError
from sglang_hetero.layout import wire
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import Role
from sglang_hetero.layout.config import geometry_from_config
from sglang_hetero.layout.manifest import Coordinates, Side
from sglang_hetero.layout.row import Column
from sglang_hetero.layout.synthetic import PoolOptions, first_token_row, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.models import spec
from sglang_hetero.models.config import model_config
from tests.unit.discovery.servers import decode_server, manifests, prefill_server

KEY = "secret"
RELEASE = releases.MADE_FOR.number


class Servers:
    """What each path answers: status and body."""

    def __init__(self):
        self.answers = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.removesuffix(peers.INSTANCE_PATH)
                status, body, key = outer.answers.get(name, (404, b"", None))
                if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                    status, body = 401, b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def add(self, name, side, tp, *, key=None, instance=None, ranks=None, **fields):
        """A server that tells everything; its URL."""
        ranks = manifests(side, tp) if ranks is None else ranks
        made = (prefill_server if side is Side.PREFILL else decode_server)(tp_size=tp, **(instance or {}))
        told = {"mode": "auto", "backend": "mooncake", "manifests": tuple(map(wire.encode, ranks)), **fields}
        self.answers[f"/{name}"] = (200, encode_description(Description(instance=made, **told)), key)
        return f"{self.url}/{name}"


@pytest.fixture
def servers():
    made = Servers()
    yield made
    made.close()


def examined(*urls, key=None, local=None):
    return {line.name: line for line in peers.examine(urls, key, local, tokens=1000)}


def test_two_that_fit_are_told_what_goes_where(servers):
    prefill, decode = servers.add("p", Side.PREFILL, 2), servers.add("d", Side.DECODE, 1)
    found = examined(prefill, decode)
    assert {line.status for line in found.values()} == {Status.OK}
    pair = f"{prefill} to {decode}"
    assert "TP 2 and TP 1 can be planned" in found[pair].seen
    for rank in (0, 1):
        assert "to decode 0, staged: " in found[f"{pair}, prefill {rank}"].seen
        assert "conv" in found[f"{pair}, prefill {rank}"].seen
    assert f"{pair}, SGLang's own path" in found


def test_two_that_do_not_fit_fail_with_the_rule(servers):
    other = tuple(replace(one, model="another") for one in manifests(Side.DECODE, 1))
    prefill, decode = servers.add("p", Side.PREFILL, 2), servers.add("d", Side.DECODE, 1, ranks=other)
    line = examined(prefill, decode)[f"{prefill} to {decode}"]
    assert line.status is Status.FAIL
    assert "another" in line.seen


def test_two_releases_of_sglang_fail_with_both(servers):
    older = tuple(replace(one, sglang="0.5.22") for one in manifests(Side.PREFILL, 2))
    for tp in (1, 2):
        prefill, decode = servers.add("p", Side.PREFILL, 2, ranks=older), servers.add("d", Side.DECODE, tp)
        found = examined(prefill, decode)
        assert "SGLang 0.5.22, 2 ranks" in found[f"prefill {prefill}"].seen
        line = found[f"{prefill} to {decode}"]
        assert line.status is Status.FAIL and "runs SGLang 0.5.22, decode" in line.seen and "0.5.23" in line.seen


def test_a_build_that_does_not_tell_its_release_of_sglang_fails_with_the_remedy(servers):
    """As the build before wrote it: version 2 of the manifest."""
    (one,) = manifests(Side.DECODE, 1)
    body = msgspec.msgpack.decode(wire.encode(one)[len(wire.MAGIC) + 1 :])
    del body["manifest"]["sglang"]
    said = encode_description(
        Description(
            instance=decode_server(tp_size=1),
            mode="auto",
            backend="mooncake",
            manifests=(wire.MAGIC + b"\x02" + msgspec.msgpack.encode(body),),
        )
    )
    servers.answers["/old"] = (200, said, None)
    line = examined(f"{servers.url}/old")[f"{servers.url}/old"]
    assert line.status is Status.FAIL
    assert "manifest has version 2, this build reads version 3; install the same version of sglang-hetero" in line.seen


def test_releases_that_do_not_understand_each_other_fail(servers):
    prefill = servers.add("p", Side.PREFILL, 2)
    decode = servers.add("d", Side.DECODE, 1, instance={"messages": 99})
    assert examined(prefill, decode)[f"{prefill} to {decode}"].status is Status.FAIL


def test_two_of_one_role_are_no_pair(servers):
    found = examined(servers.add("a", Side.PREFILL, 2), servers.add("b", Side.PREFILL, 1))
    assert found["pairs"].status is Status.SKIP


def test_one_that_has_not_told_yet_is_to_be_asked_again(servers):
    prefill = servers.add("p", Side.PREFILL, 2, ranks=())
    decode = servers.add("d", Side.DECODE, 1)
    found = examined(prefill, decode)
    assert found[f"{prefill} to {decode}"].status is Status.WARN


def test_one_that_takes_sglangs_path_only_is_told(servers):
    prefill = servers.add("p", Side.PREFILL, 2, unsupported=("context parallelism",))
    line = examined(prefill)[f"prefill {prefill}"]
    assert (line.status, "context parallelism" in line.seen) == (Status.WARN, True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, b"", None), "not of a router"),
        ((405, b"", None), "not of a router"),
        ((500, b"boom", None), "HTTP 500: boom"),
        ((200, b"{}", None), "/hetero/instance"),
        ((200, b"\xff\x00", None), "/hetero/instance"),
        ((200, b"", KEY), "give --api-key, or set SGLANG_API_KEY"),
    ],
)
def test_one_that_does_not_answer_well_fails_and_the_others_are_told(answer, words, servers):
    servers.answers["/bad"] = answer
    good = servers.add("p", Side.PREFILL, 2)
    found = examined(f"{servers.url}/bad", good)
    assert found[f"{servers.url}/bad"].status is Status.FAIL
    assert words in found[f"{servers.url}/bad"].seen
    assert found[f"prefill {good}"].status is Status.OK


def test_one_that_is_not_there_fails():
    assert examined("http://127.0.0.1:1")["http://127.0.0.1:1"].status is Status.FAIL
    assert examined("no url")["no url"].status is Status.FAIL


def test_the_key_is_shown(servers):
    url = servers.add("p", Side.PREFILL, 2, key=KEY)
    assert examined(url, key=KEY)[f"prefill {url}"].status is Status.OK


def test_no_peer_is_skipped():
    assert examined()["none"].status is Status.SKIP


# --- against a configuration ------------------------------------------------------------------------------------------


def running(servers, *, tp=2, page=1, model="tiny", depth=3, npu=False, **fields):
    """A prefill server of a seeded model, as it would tell of itself."""
    config = model_config(spec(model))
    options = PoolOptions(
        page_size=page,
        draft_rows=depth,
        conv_layout=ConvLayout.WINDOW_FIRST if npu else ConvLayout.CHANNELS_FIRST,
    )
    row = first_token_row((config["hidden_size"], "bfloat16") if depth else None)
    ranks = tuple(
        manifest(
            geometry_from_config(config),
            Side.PREFILL,
            Coordinates(tp_rank=rank, tp_size=tp),
            options,
            host="h:1",
            draft=depth > 0,
            row=fields.get("row", row),
        )
        for rank in range(tp)
    )
    return peers.ask(servers.add("p", Side.PREFILL, tp, ranks=ranks), None)


MTP = ["--speculative-algorithm", "NEXTN", "--speculative-num-draft-tokens", "4"]


def on_paper(peer, *options, model="tiny"):
    return local.configured(["--model-path", model, *options], peer, "cpu", RELEASE)


def planned(peer, *options):
    made = on_paper(peer, *MTP, *options).known
    return {line.name: line for line in peers.examine([peer.instance.url], None, made)}


def test_a_server_that_does_not_run_yet_is_planned_with(servers):
    peer = running(servers)
    # What SGLang's command line has else is of no interest here.
    found = planned(peer, "--tp-size", "1", "--max-running-requests", "8", "--disaggregation-mode", "decode")
    assert "can be planned" in found[f"{peer.instance.url} to {local.URL}"].seen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--page-size", "64"], "page"),
        (["--model", "qwen35-2b-cache"], "target_key"),
        (["--dtype", "float32"], "--kv-cache-dtype"),
        (["--kv-cache-dtype", "float32"], "--kv-cache-dtype"),
        (["--mamba-ssm-dtype", "bfloat16"], "--mamba-ssm-dtype"),
    ],
    ids=["pages", "another model", "arithmetic", "KV dtype", "SSM dtype"],
)
def test_a_configuration_that_does_not_fit_fails(options, words, servers):
    peer = running(servers)
    line = planned(peer, "--tp-size", "1", *options)[f"{peer.instance.url} to {local.URL}"]
    assert line.status is Status.FAIL
    assert words in line.seen


@pytest.mark.parametrize(
    "options",
    [["--tp-size", "x"], ["--disaggregation-mode", "prefill"], ["--kv-cache-dtype", "fp4_e2m1"]],
    ids=["no number", "of the same role", "no dtype of ours"],
)
def test_options_that_cannot_be_are_refused(options, servers):
    with pytest.raises(OptionError):
        planned(running(servers), *options)


NEXTN = ["--speculative-algorithm", "NEXTN"]
TREE = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "9"]
HIDDEN = {"speculates": (256, "bfloat16"), "does not": (64, "float32")}
"""Of `tiny`: 128 elements. Where a server does not speculate SGLang has 16 of float32."""


def hidden(known):
    (column,) = (one for one in known.ranks[0].row if one.name == "output_hidden_states")
    return column.nbytes, column.dtype


@pytest.mark.parametrize("theirs", [0, 3], ids=["peer plain", "peer drafts"])
@pytest.mark.parametrize("ours", [False, True], ids=["plain", "drafts"])
def test_the_row_with_the_first_token_is_that_of_the_options(servers, theirs, ours):
    peer = running(servers, depth=theirs)
    made = on_paper(peer, *(MTP if ours else []))
    assert hidden(made.known) == HIDDEN["speculates" if ours else "does not"]
    assert hidden(peer) == HIDDEN["speculates" if theirs else "does not"]
    assert len(made.known.ranks[0].row) == len(peer.ranks[0].row)
    line = made.line("peers")
    assert line.status is Status.OK and "fingerprint of the model" in line.seen
    assert ("speculation by NEXTN, depth 3" if ours else "no speculation") in line.seen
    assert ("the peer" in made.told) == (bool(theirs) != ours)
    found = {line.name: line for line in peers.examine([peer.instance.url], None, made.known)}
    assert found[f"{peer.instance.url} to {local.URL}"].status is Status.OK, found


def test_what_variables_add_to_the_row_is_the_peers(servers):
    """No option tells it; the column would be refused if it were only there."""
    more = (*first_token_row(None), Column("kv_checksum", "uint64", 64))
    peer = running(servers, depth=0, row=more)
    assert on_paper(peer).known.ranks[0].row == more
    assert on_paper(running(servers, row=()), *MTP).known.ranks[0].row == ()


def test_a_hidden_state_of_another_dtype_does_not_fit(servers):
    """By the rule of the hand-shake. KV caches of the same dtype, that of the draft's arithmetic differs."""
    options = ["--dtype", "float16", "--kv-cache-dtype", "bfloat16"]
    peer = running(servers)
    line = planned(peer, *options)[f"{peer.instance.url} to {local.URL}"]
    assert line.status is Status.FAIL and "column output_hidden_states" in line.seen


@pytest.mark.parametrize(
    ("options", "depth", "unsure"),
    [
        ([], 0, ""),
        (["--speculative-num-steps", "5"], 0, ""),
        ([*NEXTN, "--speculative-num-steps", "5"], 5, ""),
        ([*NEXTN, "--speculative-num-steps", "5", "--speculative-num-draft-tokens", "9"], 5, ""),
        ([*NEXTN, *TREE], 8, ""),
        ([*NEXTN, "--speculative-num-draft-tokens", "2"], 1, ""),
        (["--speculative-algorithm", "nextn", "--speculative-num-steps", "1"], 1, ""),
        ([*NEXTN, "--speculative-draft-model-path", "tiny", "--speculative-num-steps", "1"], 1, ""),
        (NEXTN, 3, "the depth, which SGLang chooses (the peer's room for drafts, 3 rows)"),
        (["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"], 7, "NGRAM keeps of a draft"),
        (
            [*NEXTN, "--speculative-draft-model-path", "other", "--speculative-num-steps", "1"],
            1,
            "with --speculative-draft-model-path other keeps of a draft",
        ),
    ],
)
def test_the_depth_is_that_of_the_options_or_it_is_said_that_they_do_not_tell(servers, options, depth, unsure):
    peer = running(servers, npu=True)
    made = on_paper(peer, "--device", "npu", "--page-size", "1", *options)
    (conv,) = made.known.ranks[0].of(Role.CONV)
    window = conv.axis(AxisName.WINDOW)
    assert window.size - window.live_rows[1] == depth
    line = made.line("peers")
    assert (line.status is Status.WARN) is bool(unsure)
    assert unsure in line.seen


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (([], None, None), "float32"),
        (([], None, "bfloat16"), "bfloat16"),
        (([], "float16", "bfloat16"), "float16"),
        ((["--mamba-ssm-dtype", "float32"], "float16", "bfloat16"), "float32"),
    ],
    ids=["nobody", "config.json", "the variable", "the option"],
)
def test_the_dtype_of_ssm_states_is_the_options_the_variables_or_the_models(
    servers, monkeypatch, tmp_path, said, wanted
):
    """In the order in which SGLang looks: who takes another one than it plans with caches that are not there."""
    options, variable, own = said
    monkeypatch.delenv("SGLANG_MAMBA_SSM_DTYPE", raising=False)
    if variable is not None:
        monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", variable)
    config = {name: value for name, value in model_config(spec("tiny")).items() if name != "mamba_ssm_dtype"}
    (tmp_path / "config.json").write_text(json.dumps(config | ({} if own is None else {"mamba_ssm_dtype": own})))
    made = on_paper(running(servers), *options, model=str(tmp_path))
    (ssm,) = made.known.ranks[0].of(Role.SSM)
    assert ssm.dtype == wanted


def test_a_configuration_without_the_size_of_a_hidden_state_is_told(servers):
    peer = running(servers)
    made = on_paper(peer, *MTP, model="Qwen3.5-2B")
    assert "hidden state's size, which config.json does not say" in made.line("peers").seen
    assert made.known.ranks[0].row == peer.ranks[0].row
    assert on_paper(peer, model="Qwen3.5-2B").line("peers").status is Status.OK  # nothing drafts, nothing is missing


def test_a_configuration_runs_the_sglang_that_is_there(servers):
    peer = running(servers)
    made = local.configured(["--model-path", "tiny", *MTP], peer, "cpu", "0.5.22")
    lines = {line.name: line for line in peers.examine([peer.instance.url], None, made.known)}
    pair = lines[f"{peer.instance.url} to {local.URL}"]
    assert pair.status is Status.FAIL and f"runs SGLang {RELEASE}, decode TP0/1 (on paper) 0.5.22" in pair.seen
    unknown = local.configured(["--model-path", "tiny", *MTP], peer, "cpu", "")
    assert unknown.known.ranks[0].sglang == RELEASE
    assert f"the release of SGLang (the peer's, {RELEASE})" in unknown.line("peers").seen


def test_a_model_that_cannot_draft_is_refused(servers):
    with pytest.raises(OptionError, match="no MTP module"):
        on_paper(running(servers), *MTP, model="tiny-gqa")
    with pytest.raises(OptionError, match="at least one"):
        on_paper(running(servers), *NEXTN, "--speculative-num-draft-tokens", "0")


def test_the_command_says_what_its_plans_rest_on(servers, capsys):
    peer = running(servers)
    options = ["--model-path", "tiny", *NEXTN]
    assert cli.main(["doctor", "--peer", peer.instance.url, "--json", "/dev/null", "--", *options]) in (0, 1)
    said = capsys.readouterr().out
    assert local.URL in said and "not told by the options: the depth" in " ".join(said.split())
