"""torchrun's elastic agent in this process: starts the ranks of one machine, and ends them all when one fails."""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from dataclasses import dataclass
from typing import Any

PATIENCE_SECONDS = 3
"""How long a rank that is told to end may take before it is killed."""


@dataclass(frozen=True)
class Outcome:
    """exit_codes: of the ranks that had failed before any was told to end (-n: killed by signal n). left: had ended well."""

    exit_codes: dict[int, int]
    stopped_by: signal.Signals | None = None
    left: tuple[int, ...] = ()

    @property
    def good(self) -> bool:
        return not self.exit_codes and self.stopped_by is None


def run_until_done(num_ranks: int, arguments: list[str], attempt: int = 0) -> Outcome:
    """Run `python ARGUMENTS` on each rank under torchrun's environment, on a free port. None is left when it returns.

    attempt: how often the ranks were started before. Each start has an agent, a store and a port of its own, so that nothing
    of the ranks before is read by those after.
    """
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    failed: dict[int, int] = {}
    left: list[int] = []

    class Agent(LocalElasticAgent):
        """The agent, with less patience than its 30 s, and with an eye on who failed of itself."""

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            started: dict[int, Any] = super()._start_workers(worker_group)
            context: Any = self._pcontext
            original = context.close

            def close(death_sig: signal.Signals | None = None, timeout: int = PATIENCE_SECONDS) -> None:
                for rank, handler in context.subprocess_handlers.items():
                    code = handler.proc.poll()
                    if code:
                        failed.setdefault(rank, code)
                    elif code == 0:
                        left.append(rank)
                original(death_sig, min(timeout, PATIENCE_SECONDS))
                context.close = original

            context.close = close
            return started

    for name in list(logging.root.manager.loggerDict):  # the launcher tells what failed
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous = registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=rendezvous,
        max_restarts=attempt,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    agent = Agent(spec, DefaultLogsSpecs(), start_method="spawn", exit_barrier_timeout=PATIENCE_SECONDS)
    agent._remaining_restarts = (
        0  # used up: TORCHELASTIC_RESTART_COUNT is the attempt, and the launcher starts the next
    )
    try:
        result = agent.run()
    except SignalException as stop:
        return Outcome({}, signal.Signals(stop.sigval))
    finally:
        rendezvous.shutdown()
    if result.is_failed() and not failed:
        failed = {rank: failure.exitcode for rank, failure in result.failures.items()}
    return Outcome(failed, left=tuple(left))
