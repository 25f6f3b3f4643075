"""Every place where SGLang calls us, in one table; put in by SGLang's own hook registry.

The registry logs what it cannot apply and goes on. So the hooks are applied here at once, and it is looked at whether
they are there: an error of ours stops the process (plugin.py).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hetero import releases
from sglang_hetero.errors import StateError, UpstreamChanged
from sglang_hetero.perf.spans import prepare
from sglang_hetero.state import folder

from . import conv_axis, layerwise, selfcheck, state_route, steps
from .classes import BACKENDS, hetero_class
from .options import Mode, Options
from .rank import building

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler"
"""Loaded in the processes that have caches; the others need the class of the bootstrap server only."""

RESULTS = f"{selfcheck.RESULTS}.SchedulerBatchResultProcessor"
"""Where the tokens of a step are taken to their requests."""


@dataclass(frozen=True)
class Hook:
    """target: SGLang's function. around: called with the original and its arguments. scheduler: only there."""

    target: str
    around: Callable[..., Any]
    scheduler: bool


def _kv_class(mode: Mode) -> Callable[..., Any]:
    def around(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
        found = original(transfer_backend, class_type)
        if transfer_backend.value not in BACKENDS or found is None:
            return found
        return hetero_class(found, class_type.value, mode)

    return around


def _init_kv_manager(original: Callable[..., Any], queue: Any) -> Any:
    with building(queue):
        return original(queue)


def hooks(options: Options) -> tuple[Hook, ...]:
    """All of them. With mode off our classes only refuse what SGLang's path would get wrong.

    The pool of the target model is watched as an object (layerwise.py), so it is not in this table.
    """
    found: tuple[Hook, ...] = (
        Hook("sglang.srt.disaggregation.utils.get_kv_class", _kv_class(options.mode), scheduler=False),
        Hook("sglang.srt.managers.disagg_service.start_disagg_service", state_route.around_start_service, False),
        Hook("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager", _init_kv_manager, True),
        Hook("sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager", _init_kv_manager, True),
    )
    if options.mode is Mode.OFF:
        return found
    found += (
        Hook(f"{RESULTS}.process_batch_result_decode", steps.around_decode_result, True),
        Hook(f"{RESULTS}.process_batch_result_prebuilt", steps.around_prebuilt_result, True),
        Hook(
            "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.checkpoint_disagg_prefill",
            layerwise.around_checkpoint,
            True,
        ),
    )
    if not options.layerwise:
        return found
    return (
        *found,
        Hook("sglang.srt.managers.scheduler.Scheduler.run_batch", layerwise.around_run_batch, True),
        Hook(
            "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.forward_extend",
            layerwise.around_linear_extend,
            True,
        ),
    )


def install(options: Options) -> None:
    """Put in what this process needs. Raises UpstreamChanged if SGLang is none that this release serves."""
    if options.trace is not None:
        prepare(Path(options.trace))
    in_scheduler = SCHEDULER in sys.modules
    release = releases.installed()
    selfcheck.require(release.rows(selfcheck.BOOTSTRAP + (selfcheck.RANK if in_scheduler else ())))
    if in_scheduler:
        if release.ran:
            logger.warning("%s", release.ran)
        release.complete()
        conv_axis.repair()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted = [hook for hook in hooks(options) if in_scheduler or not hook.scheduler]
    for hook in wanted:
        HookRegistry.register(hook.target, hook.around, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = [hook.target for hook in wanted if not _applied(hook.target)]
    if missing:
        raise UpstreamChanged(f"SGLang's hook registry has not applied the hooks on {', '.join(missing)}; see its log")
    serves = state_route.HTTP_SERVER in sys.modules
    if launches(os.environ, in_scheduler=in_scheduler, serves=serves):
        make_folder()


def make_folder() -> None:
    """The folder for the ranks' reports, named to the children. A server without it serves all the same."""
    try:
        folder.make(os.environ)
    except StateError as error:
        logger.error("/hetero/state will not tell of this server's ranks: %s", error)


def launches(environ: Mapping[str, str], *, in_scheduler: bool, serves: bool) -> bool:
    """Whether this process launches a server, so that the others of it inherit what is in its environment.

    in_scheduler, serves: whether it has loaded SGLang's scheduler and HTTP server. SGLang's command loads its plugins
    before either. A program with an sglang.Engine has no HTTP server, and neither have the processes that a server
    starts by multiprocessing; but a server may itself have been started so, as sglang_router.launch_server does.
    """
    if multiprocessing.parent_process() is None:
        return serves or not in_scheduler
    return serves and folder.VARIABLE not in environ


def _applied(target: str) -> bool:
    path, name = target.rsplit(".", 1)
    return hasattr(getattr(pkgutil.resolve_name(path), name), "__wrapped__")
