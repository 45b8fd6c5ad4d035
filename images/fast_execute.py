#!/usr/bin/env python
"""The images' pyflyte-fast-execute: one process fetches the code and executes the task.

flytekit's own starts a second process for the task, because the first may have imported the image's older
code. The second imports flytekit again, which takes as long as some light tasks. Here nothing of the project
is imported before it is fetched.
"""

import gc
import importlib.util
import os
import sys

from flytekit.bin import entrypoint

COMMANDS = {
    "pyflyte-execute": entrypoint.execute_task_cmd,
    "pyflyte-map-execute": entrypoint.map_execute_task_cmd,
}
PROJECT = ("flytune", "training_estimates", "tasks", "workflows", "images")
start_process = entrypoint._run_subprocess


def execute(command: list[str], environment: dict[str, str]) -> int:
    """Execute flytekit's `command` here and exit; if this process could not import the fetched code, start
    another.

    Args:
        command: name and arguments.
        environment: its variables; PYTHONPATH names the folder of the fetched code.

    Returns:
        The exit code of the other process.
    """
    task = COMMANDS.get(command[0])
    finds_code = set(environment["PYTHONPATH"].split(os.pathsep)) <= set(sys.path)
    if task is None or not finds_code or any(name in sys.modules for name in PROJECT):
        return int(start_process(command, environment))
    os.environ.update(environment)
    if importlib.util.find_spec("torch") is None:
        # A light task mostly imports, and the objects of libraries are not garbage; training frees its
        # tensors soon.
        gc.set_threshold(100_000)
    # The folder of the code was empty when Python first looked into it.
    importlib.invalidate_caches()
    task.main(command[1:], prog_name=command[0])
    raise AssertionError("click exits")


if __name__ == "__main__":
    entrypoint._run_subprocess = execute
    entrypoint.fast_execute_task_cmd()
