"""All processes of one topology: started together, waited for, stopped together."""

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import requests

from sglang_hetero import answers, models
from sglang_hetero.backend import options as transfer
from sglang_hetero.cpu import enable
from sglang_hetero.errors import DiscoveryError, HeteroError, OptionError
from sglang_hetero.launcher import command
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.ports import Ports
from sglang_hetero.launcher.process import Supervised
from sglang_hetero.launcher.topology import Instance, Role, Topology
from sglang_hetero.layout.checks import shorten

POLL_SECONDS = 0.5
PROGRESS_SECONDS = 10.0
HEALTH_SECONDS = 5.0
# Logs are small; this leaves room for SGLang's temporary files.
LOG_BYTES = 200 * 1000**2
SHOWN_RECORDS, SHOWN_KEY = 8, 200
"""Of what others have written to etcd: keys that are named, and characters of each."""


class StartError(HeteroError):
    """The fleet did not become healthy."""


@dataclass(frozen=True)
class Server:
    """One server of the fleet and the process that runs it."""

    instance: Instance
    endpoint: command.Endpoint
    process: Supervised


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(processes: Sequence[Supervised]) -> None:
    """Raise `ProcessDied` when one of them has ended."""
    for process in processes:
        if process.poll() is not None:
            raise process.died()


def healthy(url: str) -> bool:
    """Whether `url`, the health route of a server or router, answers 200."""
    try:
        with answers.asked("GET", url, timeout=(HEALTH_SECONDS, HEALTH_SECONDS)) as reply:
            return reply.status_code == requests.codes.ok
    except answers.BROKEN:
        return False


class Fleet:
    """`with Fleet(topology, options) as fleet:` runs the servers; leaving the block stops exactly those.

    fleet.url answers like one SGLang server. Raises `HeteroError` subclasses with one clear line (and, where a server
    died, the last lines of its log); nothing is left running then.
    """

    def __init__(self, topology: Topology, options: Options, say: Callable[[str], None] = _say) -> None:
        self.topology = topology
        self.options = options
        self.servers: list[Server] = []
        self.router: Supervised | None = None
        self._say = say
        self._log_lock: TextIO | None = None

    @property
    def url(self) -> str:
        """The router's URL, or that of the only server."""
        return self.router.url if self.router is not None else self.servers[0].endpoint.url

    @property
    def processes(self) -> list[Supervised]:
        """Every process of the fleet, the router last."""
        return [server.process for server in self.servers] + ([self.router] if self.router else [])

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Check everything that can be checked, then start all processes; does not wait for them."""
        self.options.check()
        if not self.options.chunk:
            self.options = replace(self.options, chunk=self.options.default_chunk)
        model = models.spec(self.options.model)
        self.options.check_model(model)
        self.topology.check_model(model)
        self._check_environment()
        self._check_platform()
        self._check_etcd()
        ports = Ports(self.options.host)
        front_port = ports.take(self.options.port, "--port") if self.options.port else ports.free()
        log_dir = self._log_dir()
        model_path = str(models.path(self.options.model))
        self._say(
            f"{self.topology.name}: {len(self.topology.instances)} servers, {self.topology.ranks} ranks, model "
            f"{self.options.model}, MTP depth {self._depths()}, conv {self.options.conv_layout.value}, "
            f"prefill steps of {self.options.chunk} tokens; logs in {log_dir}"
        )
        first_rank = 0
        for instance in self.topology.instances:
            self._start_server(instance, first_rank, self._endpoint(instance, ports, front_port), model_path, log_dir)
            first_rank += instance.tp
        if not self.topology.is_mixed:
            self._start_router(front_port, log_dir)

    def _endpoint(self, instance: Instance, ports: Ports, front_port: int) -> command.Endpoint:
        return command.Endpoint(
            host=self.options.host,
            port=front_port if instance.role is Role.MIXED else ports.free(),
            nccl_port=ports.free(),
            bootstrap_port=ports.free() if instance.role is Role.PREFILL else None,
            dist_port=ports.free(command.dist_ports(instance)) if instance.dp > 1 else None,
        )

    def _start_server(
        self, instance: Instance, first_rank: int, endpoint: command.Endpoint, model_path: str, log_dir: Path
    ) -> None:
        process = Supervised(
            instance.name,
            command.server_command(model_path, self.options, instance, endpoint),
            command.server_env(os.environ, self.options, instance, first_rank),
            log_dir / f"{instance.name}.log",
            endpoint.url,
        )
        self.servers.append(Server(instance, endpoint, process))
        self._say(f"{instance.name} (tp {instance.tp}): pid {process.pid}, {endpoint.url}")

    def _start_router(self, port: int, log_dir: Path) -> None:
        prefills = [s.endpoint for s in self.servers if s.instance.role is Role.PREFILL]
        decodes = [s.endpoint for s in self.servers if s.instance.role is Role.DECODE]
        url = f"http://{self.options.host}:{port}"
        self.router = Supervised(
            "router",
            command.router_command(self.options, port, prefills, decodes),
            os.environ | {"no_proxy": "*", "NO_PROXY": "*"},
            log_dir / "router.log",
            url,
            health=command.ROUTER_HEALTH[self.options.router],
        )
        self._say(f"router ({self.options.router.value}): pid {self.router.pid}, {url}")

    def _check_environment(self) -> None:
        given = {"--prefill-env": self.options.prefill_env, "--decode-env": self.options.decode_env}
        if self.topology.is_mixed and any(given.values()):
            flags = " and ".join(flag for flag, variables in given.items() if variables)
            raise OptionError(f"{flags}: {self.topology.name} is one server that does both phases; set it in the shell")
        for instance in self.topology.instances:
            command.server_env(os.environ, self.options, instance, first_rank=0)

    def _check_etcd(self) -> None:
        """An etcd that goes away later is waited for by servers and router; one that is not there at the start would
        keep the router from being ready until --start-seconds are over."""
        if not self.options.etcd:
            return
        if self.topology.is_mixed:
            raise OptionError(f"--etcd: {self.topology.name} is one server without a router; leave it out")
        from sglang_hetero.discovery.etcd import Etcd  # with requests and etcd3gw, which other fleets do not wait for

        environment = command.server_env(os.environ, self.options, self.topology.instances[0], first_rank=0)
        options = transfer.read(environment).etcd
        assert options is not None
        etcd = Etcd(options)
        try:
            there = etcd.read(f"{options.prefix}/").records
        except DiscoveryError as error:
            raise StartError(f"--etcd {self.options.etcd} cannot be used: {error}; start etcd first") from None
        finally:
            etcd.close()
        if there:
            more = f", and {len(there) - SHOWN_RECORDS} more" if len(there) > SHOWN_RECORDS else ""
            self._say(
                f"etcd has {len(there)} servers under {options.prefix} already, which the router will use, too: "
                f"{', '.join(shorten(key, SHOWN_KEY) for key in sorted(there)[:SHOWN_RECORDS])}{more}"
            )

    def _check_platform(self) -> None:
        status = enable.status()
        if status.conflict:
            raise StartError(f"the CPU reference platform cannot be used in this environment: {status.conflict}")
        if not status.enabled:
            raise StartError(
                "the CPU reference platform is off in this environment; run `sglang-hetero cpu enable` (docs/cpu.md)"
            )

    def _log_dir(self) -> Path:
        wanted = self.options.log_dir
        try:
            if wanted is None:
                folder = Path(tempfile.mkdtemp(prefix=f"sglang-hetero-{self.topology.name}-"))
            else:
                folder = wanted.absolute()
                folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            self._log_lock = open(folder / "fleet.lock", "w")  # noqa: SIM115 (held until stop)
            fcntl.flock(self._log_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"--log-dir {folder}: another fleet is logging there; choose another folder") from None
        except OSError as error:
            raise StartError(
                f"cannot write logs to {wanted or tempfile.gettempdir()}: {error.strerror or error}; choose another "
                "folder with --log-dir"
            ) from error
        if free < LOG_BYTES:
            raise StartError(
                f"only {free / 1e6:.0f} MB free in {folder}, {LOG_BYTES / 1e6:.0f} MB are needed; free some space or "
                "choose another folder with --log-dir"
            )
        return folder

    def check(self) -> None:
        """Raise `ProcessDied` when one of the processes has ended."""
        _check(self.processes)

    def process(self, name: str) -> Supervised:
        """The server, or the `router`, of this name. Raises `StartError` with the names that there are."""
        for process in self.processes:
            if process.name == name:
                return process
        raise StartError(f"{self.topology.name} has no {name!r}; it has {', '.join(p.name for p in self.processes)}")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a server's main process, or to the router. What dies with it is up to them."""
        os.kill(self.process(name).pid, number)

    def restart(self, name: str) -> float:
        """Run one server, or the router, again: same command, ports and log. The others are left alone.

        What is left of the former run is stopped first. Returns the seconds that it took; raises `ProcessDied` or,
        after options.start_seconds, `StartError`.
        """
        started = time.monotonic()
        former = self.process(name)
        process = former.again()
        if former is self.router:
            self.router = process
        else:
            self.servers = [replace(s, process=process) if s.process is former else s for s in self.servers]
        self._say(f"{name}: started again, pid {process.pid}")
        self.wait_until_healthy([process])
        return time.monotonic() - started

    def wait_until_healthy(self, processes: Sequence[Supervised] = ()) -> None:
        """Return when every server and the router, or only `processes`, are healthy; a line per process on each change
        and every 10 s.

        Raises `ProcessDied` or, after options.start_seconds, `StartError`.
        """
        start = time.monotonic()
        shown = start
        watched = list(processes) or self.processes
        waiting = list(watched)
        while waiting:
            _check(watched)
            for process in [p for p in waiting if healthy(p.health_url)]:
                waiting.remove(process)
                self._say(f"{time.monotonic() - start:5.0f} s  {process.name}: healthy")
            now = time.monotonic()
            if waiting and now - start > self.options.start_seconds:
                late = waiting[0]
                raise StartError(
                    f"{late.name} is not healthy after {self.options.start_seconds:.0f} s (--start-seconds); the last "
                    f"lines of {late.log}:\n{late.tail()}"
                )
            if waiting and now - shown > PROGRESS_SECONDS:
                shown = now
                for process in waiting:
                    self._say(f"{now - start:5.0f} s  {process.name}: {process.progress()[:120]}")
            if waiting:
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Stop all processes, at the same time; returns when nothing of them is left."""
        for process in self.processes:
            process.request_stop()
        for process in self.processes:
            process.stop()
        if self._log_lock is not None:
            self._log_lock.close()
            self._log_lock = None

    def _depths(self) -> str:
        """Depths of speculation in words; one number where all servers have the same."""
        found = {instance.role: self.options.mtp_of(instance.role) for instance in self.topology.instances}
        if len(set(found.values())) == 1:
            return str(next(iter(found.values())))
        return " and ".join(f"{depth} ({role.value})" for role, depth in found.items())

    def describe(self) -> dict[str, object]:
        """Every endpoint and pid, ready for JSON."""
        router = self.router
        return {
            "topology": self.topology.name,
            "model": self.options.model,
            "mtp": self.options.mtp,
            "conv_layout": self.options.conv_layout.value,
            "url": self.url,
            "router": None
            if router is None
            else {
                "kind": self.options.router.value,
                "url": router.url,
                "pid": router.pid,
                "log": str(router.log),
            },
            "servers": [
                {
                    "name": server.instance.name,
                    "role": server.instance.role.value,
                    "tp": server.instance.tp,
                    "dp": server.instance.dp,
                    "mtp": self.options.mtp_of(server.instance.role),
                    "url": server.endpoint.url,
                    "bootstrap_port": server.endpoint.bootstrap_port,
                    "pid": server.process.pid,
                    "log": str(server.process.log),
                }
                for server in self.servers
            ],
        }
