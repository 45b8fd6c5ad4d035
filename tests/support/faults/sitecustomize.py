"""Fault injection: Python imports this file when it starts, and a rank gets the fault of FAULT ("FAULT RANKS STEP")."""

import os

if fault := os.environ.get("FAULT"):
    import signal
    import time

    from flytune.training import step_log
    from tests.support.faults import ruin

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
            time.sleep(1.5)
        if WHAT == "hang":
            time.sleep(600)

    def struck(self: step_log.Recorder, step: int, *rest: bool) -> bool:
        if step == int(STEP) and os.environ.get("RANK", "0") in RANKS.split(","):
            strike(self)
        return end_step(self, step, *rest)

    step_log.Recorder.end_step = struck  # type: ignore[method-assign]
