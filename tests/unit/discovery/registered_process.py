"""Run as a script: a process that registers as a server's HTTP process does, says so, and ends when stdin does.

Arguments: etcd's address, the port of a server that answers /health, how to end ("exit" or "kill").
"""

import os
import signal
import sys

from sglang_hetero.backend.instance import OwnInstance, Serving, register
from sglang_hetero.backend.options import read
from sglang_hetero.layout.manifest import Side
from tests.unit.discovery.etcd_server import until


def main():
    address, port, end = sys.argv[1:]
    options = read({"SGLANG_HETERO_ETCD": address, "SGLANG_HETERO_ETCD_PREFIX": "/fleet"})
    serving = Serving("127.0.0.1", int(port), False, "model", 0, "mooncake")
    registrar = register(OwnInstance(Side.DECODE, options, None, lambda: serving), options, lambda: serving)
    until(lambda: registrar.registration.standing == "registered")
    print("registered", flush=True)
    sys.stdin.read()
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
