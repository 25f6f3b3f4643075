"""A service for each test, and the proof that nothing of it is left."""

import threading

import psutil
import pytest
import zmq

from sglang_hetero.transfer.control import ControlService
from tests.unit.transfer.control.peers import HOST, until


@pytest.fixture
def service():
    with ControlService(HOST) as made:
        yield made
        assert made.failure is None


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Neither threads nor files, whatever a test did."""
    process = psutil.Process()
    threads, files = set(threading.enumerate()), process.num_fds()
    yield
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: process.num_fds() <= files)


@pytest.fixture
def raw(service):
    """A socket that says whatever a test wants."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.set(zmq.ROUTING_ID, b"raw")
    sock.set(zmq.LINGER, 0)
    sock.set(zmq.RECONNECT_IVL, -1)
    sock.connect(f"tcp://{HOST}:{service.port}")
    yield sock
    context.destroy(linger=0)
