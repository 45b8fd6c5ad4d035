"""Fault injection: Python imports this file when it starts, and a rank gets the fault of FAULT ("FAULT RANKS
STEP")."""

import os

if fault := os.environ.get("FAULT"):
    import signal
    import sys
    import threading
    import time
    import traceback
    from pathlib import Path

    from flytune.failures import reports
    from flytune.training import step_log, watchdog
    from tests.support.faults import ruin
    from tests.support.waiting import until

    WHAT, RANKS, STEP = fault.split()
    end_step = step_log.Recorder.end_step

    def strike(recorder: step_log.Recorder) -> None:
        if WHAT == "bug":
            raise KeyError("a bug")
        if WHAT == "nan":
            ruin(recorder._trainer.model)
        if WHAT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if WHAT == "memory":
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if WHAT == "preempt":
            # Kubernetes sends SIGTERM to the process that started the ranks.
            os.kill(os.getppid() if "RANK" in os.environ else os.getpid(), signal.SIGTERM)
        if WHAT in ("preempt", "wait"):
            until(lambda: recorder._trainer.run.stopper.is_signalled)
        if WHAT == "hang":
            time.sleep(600)

    has_come = threading.Event()
    passed = [0.0]

    def now() -> float:
        """Let twenty seconds pass at each look where the step of a hang has come, and the rank waits: first
        in the others, then in that one."""
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
        waits = {frame.name for frame in stack} & {"all_reduce", "strike"}
        others = [
            rank
            for rank in range(int(os.environ.get("WORLD_SIZE", "1")))
            if str(rank) not in RANKS.split(",")
        ]
        path = Path(os.environ.get(reports.FOLDER, ""))
        late = (
            has_come.is_set()
            and waits
            and ("strike" not in waits or all((path / f"{rank}.json").exists() for rank in others))
        )
        passed[0] += 20.0 if late else 0.0
        return time.monotonic() + passed[0]

    if WHAT == "hang":
        watchdog.now, watchdog.PAUSE = now, 0.05

    def struck(self: step_log.Recorder, step: int, *rest: bool) -> bool:
        if step == int(STEP):
            # The end of the rank that sleeps is the end of all: it comes last.
            watchdog.SECONDS_FOR_OTHERS = 0.0 if os.environ.get("RANK") in RANKS.split(",") else 600.0
            has_come.set()
            if os.environ.get("RANK", "0") in RANKS.split(","):
                strike(self)
        return end_step(self, step, *rest)

    step_log.Recorder.end_step = struck  # type: ignore[method-assign]
