"""A process with a Mooncake engine whose memory is the file argv[1]: the test sees it through the same file.

Says `ready SESSION ADDRESS` and ends with its standard input.
"""

import mmap
import sys

import numpy as np
from mooncake.engine import TransferEngine

engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
with open(sys.argv[1], "r+b") as file:
    memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
# The last page stays unregistered: nobody may write there.
assert engine.batch_register_memory([memory.ctypes.data], [len(memory) - mmap.PAGESIZE]) == 0
print(f"ready 127.0.0.1:{engine.get_rpc_port()} {memory.ctypes.data}", flush=True)
sys.stdin.read()
