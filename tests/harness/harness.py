"""The zygote, and the pairs made from it."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV
from sglang_hetero.launcher.ports import Ports

from .geometry import Geometry
from .pair import Pair
from .processes import RankProcess, ZygoteProcess
from .sides import LOOPBACK, NO_BOOTSTRAP, Shard, Side


class Harness:
    """Starts pairs. Use as a context manager."""

    def __init__(self) -> None:
        self._ports = Ports(LOOPBACK)
        self._zygote = ZygoteProcess()
        self._pairs: list[Pair] = []
        self._processes: list[RankProcess] = []

    @property
    def zygote_threads(self) -> int:
        return int(self._zygote.ready["threads"])

    def pair(self, geometry: Geometry, *, prefill_tp: int | Sequence[int], decode_tp: int, **options: Any) -> Pair:
        """Start a pair; options are Pair's.

        `prefill_tp` may be several sizes, each of a prefill side of its own. `seed` decides which pages and slots its
        requests get. `prefill_env` and `decode_env` are added to the environment of a side's processes before plugins
        are loaded there; bootstrap servers belong to prefill.
        """
        sizes = [prefill_tp] if isinstance(prefill_tp, int) else list(prefill_tp)
        ports = [self._ports.free() for _ in sizes]
        pair = Pair(self._zygote, geometry, bootstrap_ports=ports, prefill_tp=sizes, decode_tp=decode_tp, **options)
        self._pairs.append(pair)
        return pair

    def core(self, geometry: Geometry, *, seed: int = 0) -> RankProcess:
        """A process for core.py, which moves requests between real pools with our core instead of SGLang's transfer."""
        process = self._zygote.spawn("core", {CONV_LAYOUT_ENV: geometry.conv_layout.value})
        self._processes.append(process)
        process.call("build", Shard(geometry, tp=1, rank=0), Side("core", "mooncake", NO_BOOTSTRAP, shuffle_seed=seed))
        return process

    def close(self) -> None:
        """End every process."""
        for pair in self._pairs:
            pair.close()
        for process in self._processes:
            process.stop()
        self._zygote.stop()

    def __enter__(self) -> "Harness":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
