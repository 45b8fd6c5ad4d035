"""Picture of a command's output in a terminal, as docs/images/terminal.svg has it.

python -m demo.terminal_picture docs/images/terminal.svg flytune plan recipes/llama-2-70b-lora-fsdp.yaml
--samples 20000
"""

import io
import os
import subprocess
import sys

from rich.console import Console
from rich.text import Text

COLUMNS = 100


def write(path: str, command: list[str]) -> None:
    """Run `command`, and write its output to `path` as SVG, with COLUMNS characters a line.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    console = Console(record=True, file=io.StringIO(), width=COLUMNS)
    console.print(Text(f"$ {' '.join(command)}"))
    console.print(Text.from_ansi(run.stdout))
    console.save_svg(path, title=" ".join(command[:2]))


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2:])
