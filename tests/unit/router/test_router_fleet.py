"""A router before servers that tell what their caches are, and the command itself as a process."""

import asyncio
import itertools
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from msgspec.structs import replace

from sglang_hetero.cli import main
from sglang_hetero.discovery.record import Description, Instance, fingerprint_of
from sglang_hetero.layout import wire
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router import ask, fleet
from sglang_hetero.router.health import Limits
from sglang_hetero.router.pairing import Pairing
from sglang_hetero.router.policy import RoundRobin
from tests.unit.discovery.servers import manifests
from tests.unit.router.fakes import DONE, LIMIT, Changing, FakeServer, event, run, soon, standing, token, until

BODY = {"text": "What is a shard?", "stream": False}


def telling(role: Side, tp: int, *, model: str = "tiny", checkpoint: str = "m", **fields: object) -> FakeServer:
    """A server of that size that answers every request and says who it is."""
    said = Instance(role=role, url="http://0.0.0.0:1", model=model, tp_size=tp, **({"messages": 2} | fields))
    encoded = tuple(wire.encode(one) for one in manifests(role, tp, model=checkpoint))
    description = Description(instance=said, mode="auto", backend="mooncake", manifests=encoded)
    server = FakeServer(role, description, script=lambda call: call.answer(token(f"{role} {tp} {model}")))
    server.answers["/v1/models"] = {"object": "list", "data": [{"id": model}]}
    return server


def test_only_pairs_that_fit_get_requests_and_the_others_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        prefill, wrong = telling(Side.PREFILL, 2), telling(Side.PREFILL, 2, checkpoint="another")
        decode, stock = telling(Side.DECODE, 1), FakeServer(Side.DECODE)
        async with standing(prefill, wrong, decode, stock, limits=Limits(interval=0.05, backoff=0.05)) as stand:
            async with asyncio.timeout(LIMIT):
                while any(one["fit"] == "pending" for one in (await stand.get("/hetero/pairs"))[1]["pairs"]):
                    await asyncio.sleep(0.01)
            _, said = await stand.get("/hetero/pairs")
            found = {(one["prefill"], one["decode"]): (one["fit"], one["reason"]) for one in said["pairs"]}
            assert found[(prefill.url, decode.url)][0] == "yes"
            fit, reason = found[(wrong.url, decode.url)]
            assert fit == "no" and "start both with the same checkpoint" in reason and wrong.url in reason
            assert found[(prefill.url, stock.url)][0] == "no"
            for _ in range(6):
                assert await stand.post("/generate", BODY) == (200, token("decode 1 tiny"))
            assert not wrong.seen and not stock.seen and len(prefill.seen) == 6
            # All pairs are judged again when a server comes; what is the same is not said again.
            another = telling(Side.DECODE, 2)
            await another.start()
            stand.members.change(*(server.instance for server in (prefill, wrong, decode, stock, another)))
            async with asyncio.timeout(LIMIT):
                while len((await stand.get("/hetero/pairs"))[1]["pairs"]) < 6 or "pending" in str(
                    (await stand.get("/hetero/pairs"))[1]
                ):
                    await asyncio.sleep(0.01)
            await another.stop()
        assert sum(reason in one.getMessage() for one in caplog.records) == 1

    caplog.set_level(logging.WARNING)
    run(test)


def test_a_server_that_is_restarted_with_another_layout_is_looked_at_anew() -> None:
    async def test() -> None:
        prefill, decode = telling(Side.PREFILL, 2), telling(Side.DECODE, 1)
        async with standing(prefill, decode) as stand:
            await decode.stop()
            assert (await stand.post("/generate", BODY))[0] != 200
            decode.description = telling(Side.DECODE, 1, checkpoint="another").description
            await decode.start()
            async with asyncio.timeout(LIMIT):
                while "same checkpoint" not in str((await stand.get("/hetero/pairs"))[1]):
                    await asyncio.sleep(0.01)
            status, answer = await stand.post("/generate", BODY)
            assert status == 503 and "same checkpoint" in answer["error"]["message"]

    run(test)


def test_a_server_that_was_not_well_is_asked_again_what_its_caches_are() -> None:
    async def test() -> None:
        prefill, decode = telling(Side.PREFILL, 2), telling(Side.DECODE, 1)
        async with standing(prefill, decode, limits=Limits(interval=0.02, backoff=0.02)) as stand:
            decode.health = 503
            async with asyncio.timeout(LIMIT):
                while '"evicted"' not in json.dumps((await stand.get("/hetero/pairs"))[1]):
                    await asyncio.sleep(0.01)
            decode.description = telling(Side.DECODE, 1, checkpoint="another").description
            decode.health = 200
            async with asyncio.timeout(LIMIT):
                while "same checkpoint" not in str((await stand.get("/hetero/pairs"))[1]):
                    await asyncio.sleep(0.01)

    run(test)


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Pairs of layouts are judged only while it is set."""
    go = threading.Event()
    go.set()
    judge = Pairing.by_layout

    def wait(self, prefill, decode):
        assert go.wait(2 * LIMIT)
        return judge(self, prefill, decode)

    monkeypatch.setattr(Pairing, "by_layout", wait)
    yield go
    go.set()


def test_a_restarted_server_gets_nothing_for_what_it_was_before(judging: threading.Event) -> None:
    async def test() -> None:
        prefill, decode = telling(Side.PREFILL, 2), telling(Side.DECODE, 1)
        async with standing(prefill, decode) as stand:
            assert (await stand.post("/generate", BODY))[0] == 200
            judging.clear()
            decode.description = telling(Side.DECODE, 1, checkpoint="another", model="other").description
            stand.members.change(prefill.instance, replace(decode.instance, incarnation="2", model="other"))
            async with asyncio.timeout(LIMIT):
                while (await _shown(stand, decode))["model"] != "other" or not (await _shown(stand, decode))["told"]:
                    assert (await stand.post("/generate", BODY))[0] == 503
                    await asyncio.sleep(0.01)
            # It has told, and nobody has judged it: that the one before it fitted counts for nothing.
            for _ in range(3):
                assert (await stand.post("/generate", BODY))[0] == 503
            assert len(decode.seen) == 1
            judging.set()

    run(test)


def test_a_verdict_that_comes_after_a_restart_is_not_about_the_new_server(monkeypatch) -> None:
    judge, gates, turns = Pairing.by_layout, (threading.Event(), threading.Event()), itertools.count()

    def wait(self, prefill, decode):
        assert gates[min(next(turns), 1)].wait(2 * LIMIT)
        return judge(self, prefill, decode)

    async def test() -> None:
        prefill, decode = telling(Side.PREFILL, 2), telling(Side.DECODE, 1)
        async with standing(prefill, decode, ready=False) as stand:
            async with asyncio.timeout(LIMIT):  # now the two are being judged
                while not (await _shown(stand, prefill))["told"] or not (await _shown(stand, decode))["told"]:
                    await asyncio.sleep(0.01)
            decode.description = telling(Side.DECODE, 1, checkpoint="another", model="other").description
            stand.members.change(prefill.instance, replace(decode.instance, incarnation="2"))
            gates[0].set()
            async with asyncio.timeout(LIMIT):
                while (await _shown(stand, decode))["model"] != "other":
                    assert (await stand.post("/generate", BODY))[0] == 503
                    await asyncio.sleep(0.01)
            for _ in range(3):
                assert (await stand.post("/generate", BODY))[0] == 503
            gates[1].set()
            async with asyncio.timeout(LIMIT):
                while "--served-model-name" not in str((await stand.get("/hetero/pairs"))[1]):
                    await asyncio.sleep(0.01)
            assert not decode.seen

    monkeypatch.setattr(Pairing, "by_layout", wait)
    try:
        run(test)
    finally:
        for gate in gates:
            gate.set()


def test_an_eviction_is_told_once_though_a_probe_was_under_way(caplog) -> None:
    """As when a process dies: its connections break, and the probe that was asked fails after them."""

    async def test() -> None:
        asked, silent = asyncio.Event(), asyncio.Event()

        class Silent:
            async def healthy(self, _: Instance) -> None:
                asked.set()
                await silent.wait()
                raise ask.NoAnswer("nobody there")

        prefill = Instance(role=Side.PREFILL, url="http://127.0.0.1:1")
        made = fleet.Fleet(
            Changing(prefill),
            Silent(),
            policy=RoundRobin(),
            pairing=Pairing(),
            limits=Limits(),
            clock=asyncio.get_running_loop().time,
        )
        await made.start()
        try:
            await asked.wait()
            (server,) = made.servers
            server.health.probe_answered()
            for _ in range(3):
                made.failed(server, "the connection broke", fleet.LOST)
            silent.set()
            async with asyncio.timeout(LIMIT):
                while server.health.cause == "the connection broke":
                    await asyncio.sleep(0.01)
        finally:
            await made.close()

    with caplog.at_level(logging.INFO):
        run(test)
    told = [line.partition(" was ")[2] for line in caplog.messages if " was " in line]
    assert told == ["healthy, is suspect: the connection broke", "suspect, is evicted: the connection broke"]


def test_a_server_that_was_evicted_gets_nothing_until_it_has_told_anew() -> None:
    async def test() -> None:
        prefill, decode = telling(Side.PREFILL, 2), telling(Side.DECODE, 1)
        async with standing(prefill, decode, limits=Limits(interval=0.02, backoff=0.02)) as stand:
            decode.health = 503
            async with asyncio.timeout(LIMIT):
                while (await _shown(stand, decode))["state"] != "evicted":
                    await asyncio.sleep(0.01)
            decode.description = telling(Side.DECODE, 1, checkpoint="another").description
            decode.key, decode.health = "a key that the router lacks", 200
            async with asyncio.timeout(LIMIT):
                while (await _shown(stand, decode))["state"] != "healthy":
                    assert (await stand.post("/generate", BODY))[0] == 503
                    await asyncio.sleep(0.01)
            shown = await _shown(stand, decode)
            assert not shown["told"] and shown["model"] == "tiny"
            status, answer = await stand.post("/generate", BODY)
            assert status == 503 and "--api-key" in answer["error"]["message"] and not decode.seen

    run(test)


def test_a_question_that_stays_without_an_answer_does_not_cost_a_server_that_is_well(monkeypatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(fleet, "DESCRIBE_SECONDS", 0.0)
        prefill, decode = telling(Side.PREFILL, 2), telling(Side.DECODE, 1)
        async with standing(prefill, decode, limits=Limits(interval=0.02, backoff=0.02)) as stand:

            async def silent(self, instance):
                asked.append(instance)
                raise ask.NoAnswer("no answer")

            asked: list[Instance] = []
            monkeypatch.setattr(ask.Asker, "describe", silent)
            async with asyncio.timeout(LIMIT):
                while len(asked) < 8:
                    assert (await stand.post("/generate", BODY))[0] == 200
                    await asyncio.sleep(0.01)

    run(test)


def test_a_record_that_is_corrected_is_not_used_for_what_it_said_before() -> None:
    async def test() -> None:
        prefill, decode = telling(Side.PREFILL, 2, incarnation="1"), telling(Side.DECODE, 1, incarnation="1")
        async with standing(prefill, decode) as stand:
            decode.key = "secret"
            stand.members.change(prefill.instance, replace(decode.instance, incarnation="", model="other"))
            async with asyncio.timeout(LIMIT):
                while (await stand.post("/generate", BODY))[0] != 503:
                    await asyncio.sleep(0.01)
            shown = await _shown(stand, decode)
            assert shown["model"] == "other" and not shown["told"]

    run(test)


def test_no_more_servers_are_followed_than_the_router_can_bear(monkeypatch, caplog) -> None:
    async def test() -> None:
        monkeypatch.setattr(fleet, "MAX_OF_ROLE", 2)
        servers = [telling(Side.PREFILL, 1), telling(Side.DECODE, 1)]
        async with standing(*servers) as stand:
            junk = [Instance(role=Side.DECODE, url=f"http://127.0.0.1:{port}") for port in range(1, 6)]
            stand.members.change(*junk, *(server.instance for server in servers))
            async with asyncio.timeout(LIMIT):
                while len((await stand.get("/hetero/pairs"))[1]["servers"]) != 3:
                    await asyncio.sleep(0.01)
            _, said = await stand.get("/hetero/pairs")
            assert "4 servers more than the 2" in said["trouble"]
            assert (await stand.post("/generate", BODY))[0] == 200, "who was there first has lost its place"

    run(test)
    assert "4 servers more" in caplog.text


async def _shown(stand, server: FakeServer) -> dict:
    return next(one for one in (await stand.get("/hetero/pairs"))[1]["servers"] if one["url"] == server.url)


def test_a_server_that_leaves_the_list_is_not_asked_any_more() -> None:
    async def test() -> None:
        servers = [telling(Side.PREFILL, 1), telling(Side.DECODE, 1), telling(Side.DECODE, 1)]
        async with standing(*servers) as stand:
            before = len(asyncio.all_tasks())
            stand.members.change(*(server.instance for server in servers[:2]))
            async with asyncio.timeout(LIMIT):
                while len(asyncio.all_tasks()) != before - 1:
                    await asyncio.sleep(0.01)

    run(test)


def test_a_record_that_says_whose_layout_it_has_is_used_before_it_is_asked() -> None:
    async def test() -> None:
        prefill, decode, again = telling(Side.PREFILL, 2), telling(Side.DECODE, 1), telling(Side.DECODE, 1)
        await again.start()
        try:
            async with standing(prefill, decode) as stand:
                again.description = None  # it would be taken for stock, and would not fit
                shown = fingerprint_of(Side.DECODE, "auto", "mooncake", manifests(Side.DECODE, 1), ())
                record = replace(again.instance, fingerprint=shown, model="tiny", incarnation="1")
                again.key = "secret"
                stand.members.change(prefill.instance, record)
                async with asyncio.timeout(LIMIT):
                    while (await stand.post("/generate", BODY))[0] != 200:
                        await asyncio.sleep(0.01)
                assert again.seen
        finally:
            await again.stop()

    run(test)


def test_a_server_that_is_known_is_looked_after_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        prefill, decode = telling(Side.PREFILL, 2), telling(Side.DECODE, 1)
        async with standing(prefill, decode, limits=Limits(interval=0.01)):
            await until(lambda: min(prefill.probes, decode.probes) > 3)
            assert "cannot be looked after" not in caplog.text

    run(test)


def test_a_prefill_that_is_given_without_its_port_tells_it() -> None:
    async def test() -> None:
        prefill, decode = telling(Side.PREFILL, 2, bootstrap_port=9123), telling(Side.DECODE, 1)
        async with standing(prefill, decode) as stand:
            stand.members.change(replace(prefill.instance, bootstrap_port=0, incarnation="2"), decode.instance)
            async with asyncio.timeout(LIMIT):
                while (await stand.get("/hetero/pairs"))[1]["servers"][1]["bootstrap_port"] != 9123:
                    await asyncio.sleep(0.01)
            await stand.ready()
            await stand.post("/generate", BODY)
            assert prefill.seen[-1].body["bootstrap_port"] == 9123

    run(test)


def test_a_request_gets_servers_of_the_model_that_it_names() -> None:
    async def test() -> None:
        servers = [telling(role, 1, model=model) for role in Side for model in ("one", "two")]
        async with standing(*servers) as stand:
            async with asyncio.timeout(LIMIT):
                while any(one["fit"] == "pending" for one in (await stand.get("/hetero/pairs"))[1]["pairs"]):
                    await asyncio.sleep(0.01)
            for model in ("one", "two", "two", "one", "one"):
                status, answer = await stand.post("/v1/completions", {"prompt": "a", "model": model})
                assert (status, answer["text"]) == (200, f"decode 1 {model}")
            assert (await stand.post("/v1/completions", {"prompt": "a", "model": "default"}))[0] == 200
            names = [one["id"] for one in (await stand.get("/v1/models"))[1]["data"]]
            assert sorted(names) == ["one", "two"]
            await servers[0].stop()
            async with asyncio.timeout(LIMIT):
                while (await stand.post("/v1/completions", {"prompt": "a", "model": "one"}))[0] != 503:
                    await asyncio.sleep(0.01)
            assert (await stand.post("/v1/completions", {"prompt": "a", "model": "two"}))[0] == 200

    run(test)


@asynccontextmanager
async def command(*arguments: str):
    """`sglang-hetero router` as a process, and its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_hetero", "router", "--host", "127.0.0.1", "--port", "0", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line.startswith("READY http://127.0.0.1:"), (await process.stderr.read()).decode()
        yield process, line.split()[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_the_command_serves_ends_what_is_under_way_and_then_itself() -> None:
    async def test() -> None:
        prefill = FakeServer(Side.PREFILL, script=lambda call: call.finish(event(token("a"))))
        decode = FakeServer(Side.DECODE)
        await prefill.start()
        await decode.start()
        try:
            flags = ("--pd-disaggregation", "--mini-lb", "--prefill", prefill.url, "9001", "--decode", decode.url)
            async with command(*flags) as (process, url), aiohttp.ClientSession() as client:

                async def ask() -> bytes:
                    async with client.post(f"{url}/generate", json=BODY | {"stream": True}) as response:
                        return await response.read()

                async with asyncio.timeout(LIMIT):
                    while True:
                        async with client.get(f"{url}/readiness") as response:
                            if response.status == 200:
                                break
                        await asyncio.sleep(0.01)
                task = asyncio.create_task(ask())
                now = await soon(decode.calls.get())
                assert now.body["bootstrap_port"] == 9001
                now.send(event(token("a")))
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(LIMIT):  # it takes no further requests
                    while True:
                        try:
                            async with aiohttp.ClientSession() as other, other.get(f"{url}/health"):
                                await asyncio.sleep(0.05)
                        except aiohttp.ClientError:
                            break
                assert process.returncode is None
                now.finish()
                assert await soon(task) == event(token("a")) + DONE
                assert await soon(process.wait()) == 0
                log = (await process.stderr.read()).decode()
                assert f"prefill {prefill.url} and decode {decode.url}" in log and "Traceback" not in log, log
        finally:
            await prefill.stop()
            await decode.stop()

    run(test)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "--prefill and --decode, or --etcd"),
        (["--prefill", "http://a:1"], "at least one --prefill and one --decode"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--etcd", "c:1"], "one of the two"),
        (["--prefill", "http://a:1", "8998", "x", "--decode", "http://b:1"], "repeat the flag"),
        (["--prefill", "http://a:1", "x", "--decode", "http://b:1"], "must be a number or none"),
        (["--prefill", "a", "--decode", "http://b:1"], "no URL"),
        (["--prefill", "http://a:1", "70000", "--decode", "http://b:1"], "bootstrap_port"),
    ],
)
@pytest.mark.parametrize("name", ["router", "sync-router"])
def test_wrong_flags_are_refused_in_one_line(name, flags, told, capsys, monkeypatch) -> None:
    monkeypatch.delenv("SGLANG_HETERO_ETCD", raising=False)
    if name == "sync-router":
        flags = ["--router", "http://127.0.0.1:1", *flags]
    assert main([name, *flags]) == 1
    assert told in capsys.readouterr().err


def test_a_policy_that_is_none_is_refused(capsys) -> None:
    assert main(["router", "--prefill", "http://a:1", "--decode", "http://b:1", "--policy", "best"]) == 1
    assert "--policy best" in capsys.readouterr().err


def test_a_busy_port_is_refused(capsys) -> None:
    async def test() -> None:
        async with standing(telling(Side.PREFILL, 1), telling(Side.DECODE, 1)) as stand:
            port = stand.url.rsplit(":", 1)[1]
            flags = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--port", port]
            assert await asyncio.to_thread(main, ["router", "--host", "127.0.0.1", *flags]) == 1

    run(test)
    assert "another --port" in capsys.readouterr().err


def test_help_has_examples(capsys) -> None:
    for name in ("router", "sync-router"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert f"sglang-hetero {name} --" in capsys.readouterr().out
