"""A thread of SGLang's that receives outlives whatever a frame does to it (case 34)."""

import random
import threading

import pytest
import zmq

from sglang_hetero.backend.guard import survives
from tests.unit.backend.prefill_server import until


class Loop:
    """A thread as SGLang's: a loop without a net around positional frames."""

    def __init__(self, context, guard=True):
        self.stopped, self.seen, self.dropped = False, [], []
        self.socket = context.socket(zmq.PULL)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)

        def receive():
            return self.socket.recv_multipart() if poller.poll(20) else None

        recv = survives(receive, stopped=lambda: self.stopped, dropped=self.dropped.append) if guard else receive

        def loop():
            while not self.stopped:
                frames = recv()
                if frames is None:
                    continue
                room = frames[0].decode("ascii")
                if room == "None":
                    self.seen.append(frames[3].decode("ascii"))
                else:
                    self.seen.append(int(room) + int(frames[7].decode("ascii")))

        self.thread = threading.Thread(target=loop, daemon=True)
        self.thread.start()

    def end(self):
        self.stopped = True
        self.thread.join(5)
        self.socket.close(0)


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


def send(context, loop, *messages):
    with context.socket(zmq.PUSH) as sock:
        sock.set(zmq.LINGER, 5000)
        sock.connect(f"tcp://127.0.0.1:{loop.port}")
        for frames in messages:
            sock.send_multipart(frames)


GOOD = [b"5", b"", b"", b"", b"", b"", b"", b"2"]


def test_thousands_of_damaged_frames_and_then_a_real_one(context):
    loop, choice = Loop(context), random.Random(7)
    frames = []
    for _ in range(3000):
        count = choice.randrange(1, 9)
        frames.append([choice.choice([choice.randbytes(choice.randrange(9)), b"None", b"5"]) for _ in range(count)])
    send(context, loop, *frames, GOOD)
    until(lambda: 7 in loop.seen)
    assert len(loop.seen) + len(loop.dropped) == 3001
    assert len(loop.dropped) > 2000
    assert loop.thread.is_alive()
    loop.end()
    assert not loop.thread.is_alive(), "it ends when it is to end"


def test_without_it_the_thread_dies(context, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    loop = Loop(context, guard=False)
    send(context, loop, [b"\xff"])
    until(lambda: not loop.thread.is_alive())
    loop.end()


def test_a_socket_that_is_closed_ends_the_thread(context, monkeypatch):
    ended = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: ended.append(arguments.exc_type))

    def receive():
        raise zmq.ContextTerminated

    calls = []
    guarded = survives(receive, stopped=lambda: False, dropped=calls.append)
    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert (ended, calls) == ([zmq.ContextTerminated], [])


def test_called_without_a_thread_of_its_own_it_just_receives():
    assert survives(lambda: [b"x"], stopped=lambda: False, dropped=print)() == [b"x"]
