"""What the faults on real servers are judged by: a server's state, a client's end, and what is skipped."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from sglang_hetero.launcher.ports import Ports
from sglang_hetero.state.report import Control, Report, encode, state_of
from tests.faults import hosts, servers
from tests.faults.result import Verdict
from tests.faults.servers_ask import Asker, End, Pair
from tests.faults.servers_state import AT_MOST, State, differences

OURS = {"rooms": 0, "inboxes": 0, "units": 8, "units_free": 8}
SGLANG = {"pages_free": 100, "running": 0}
PROCESS = {"threads": 30, "sockets": 20, "rss_bytes": 10**9, "files": 50}


def state(server: str = "decode0", faults: tuple[str, ...] = (), **changes: int) -> dict[str, State]:
    """A server's answer, read; `changes` of its figures."""
    report = Report(
        side="decode",
        rank="decode TP0/1",
        pid=1,
        ours={name: changes.get(name, value) for name, value in OURS.items()},
        sglang={name: changes.get(name, value) for name, value in SGLANG.items()},
        process={name: changes.get(name, value) for name, value in PROCESS.items()},
        faults=list(faults),
    )
    control = Control(ranks=2, parked=changes.get("parked", 0))
    found = state_of([report], mode="auto", side="decode", now=0.0, alive=lambda _pid: True, control=control)
    return {server: State.read(encode(found), 200)}


def test_a_server_that_is_as_it_was_has_no_differences():
    assert not list(differences(state(), state()))


@pytest.mark.parametrize(
    ("name", "value"),
    [("rooms", 1), ("units_free", 7), ("pages_free", 99), ("pages_free", 101), ("running", 1), ("parked", 1)],
)
def test_what_is_held_must_be_exactly_as_at_the_start(name, value):
    (line,) = differences(state(), state(**{name: value}))
    before = {**OURS, **SGLANG, "parked": 0}[name]
    assert line.startswith("decode0 ") and line.endswith(f" {name} is {value}, was {before}")


@pytest.mark.parametrize("name", ["threads", "sockets", "rss_bytes"])
def test_threads_sockets_and_memory_may_be_less_but_not_more(name):
    before = PROCESS[name]
    assert not list(differences(state(), state(**{name: before - 1})))
    assert not list(differences(state(), state(**{name: before + AT_MOST[name]})))
    (line,) = differences(state(), state(**{name: before + AT_MOST[name] + 1}))
    assert name in line


def test_a_fault_and_an_answer_that_is_none_are_told():
    (line,) = differences(state(), state(faults=("the thread hetero-merge has ended",)))
    assert line == "decode0 says: decode TP0/1: the thread hetero-merge has ended"
    lines = list(differences(state(), {"decode0": State.read(b"Not Found", 404)}))
    assert "HTTP 404" in lines[0] and "is not told any more" in lines[1]
    lines = list(differences(state(), {"decode0": State.read(b"{}", 200)}))
    assert "not what /hetero/state answers" in lines[0]


def test_a_new_process_has_threads_of_its_own_but_holds_what_the_former_did():
    start = state()["decode0"].started_again(state(threads=99, units_free=5)["decode0"])
    lines = list(differences({"decode0": start}, state(threads=99, units_free=5)))
    assert len(lines) == 1 and "units_free is 5, was 8" in lines[0]


def answer(tokens: int, reason: dict | None) -> bytes:
    meta = {"finish_reason": reason, "output_token_logprobs": [[-0.5, 1, None]] * tokens}
    return b"data: " + json.dumps({"output_ids": list(range(tokens)), "meta_info": meta}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ENDS = {
    "right": (200, answer(1, None) + answer(2, {"type": "length"}) + DONE),
    "aborted": (200, answer(1, {"type": "abort", "message": "prefill is gone"}) + DONE),
    "error": (200, b'data: {"error": {"message": "decode is gone"}}\n\n' + DONE),
    "status": (503, b"no"),
    "broken": (200, answer(1, None)),
}


def ends_of(prefill: str, decode: str, limit: float = 20.0) -> dict[str, End]:
    """The ends of a request to two servers that answer so; `silent`: not at all; `dead`: nobody listens."""

    async def handle(request: web.Request) -> web.StreamResponse:
        how = {"p": prefill, "d": decode}[request.match_info["side"]]
        if how == "silent":
            await asyncio.sleep(60)
        status, body = ENDS[how]
        return web.Response(status=status, body=body)

    async def run() -> dict[str, End]:
        app = web.Application()
        app.router.add_post("/{side}/generate", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        ports = Ports("127.0.0.1")
        port, dead = ports.free(), ports.free()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        urls = {how: f"http://127.0.0.1:{dead if how == 'dead' else port}" for how in (prefill, decode)}
        try:
            async with aiohttp.ClientSession() as session:
                asker = Asker(session, Pair(f"{urls[prefill]}/p", 1, f"{urls[decode]}/d", ""), limit)
                return await asker.ask([1, 2], 2).ends()
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_each_side_has_an_end_of_its_own():
    ends = ends_of("right", "aborted")
    assert ends["prefill"].arrived and ends["prefill"].tokens == (0, 1) and ends["prefill"].logprobs == (-0.5, -0.5)
    assert not ends["decode"].arrived and "prefill is gone" in ends["decode"].error and not ends["decode"].lost


@pytest.mark.parametrize(("how", "text"), [("error", "decode is gone"), ("status", "HTTP 503: no")])
def test_an_error_of_a_server_is_told_as_it_is(how, text):
    end = ends_of("right", how)["decode"]
    assert text in end.error and not end.lost and not end.hung


@pytest.mark.parametrize("how", ["broken", "dead"])
def test_a_connection_that_breaks_or_cannot_be_made_is_lost(how):
    end = ends_of(how, "right")["prefill"]
    assert end.lost and end.error and not end.arrived


def test_no_answer_within_the_limit_is_hung():
    end = ends_of("right", "silent", limit=0.3)["decode"]
    assert end.hung and not end.arrived


def test_hosts_that_cannot_be_are_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(hosts, "obstacle", lambda: "needs CAP_NET_ADMIN, which this process has not")
    results = []
    hosts.run(hosts.CASES, results.append, harness=None)
    assert [result.verdict for result in results] == [Verdict.SKIPPED] * len(hosts.CASES)
    assert all("CAP_NET_ADMIN" in result.skipped for result in results)


def test_no_two_faults_have_the_same_name():
    names = [(case.fault, case.step) for case in (*servers.CASES, *hosts.CASES)]
    assert len(set(names)) == len(names)
