"""How long a laptop waits: reading a recipe, planning it, and importing the workflow; each in a fresh process.

The peer is what a training script pays before its first line of work: importing TRL's SFTTrainer.
"""

import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

CASES = {
    "read a recipe": "from flytune.recipe import Recipe; Recipe.from_yaml('recipes/demo-qlora.yaml')",
    "plan a recipe": "from flytune.cli import main; main(['plan', 'recipes/demo-qlora.yaml', '--json'])",
    "import the workflow": "import workflows.finetune",
    "peer: import SFTTrainer": "from trl import SFTTrainer",
}
ROUNDS = 5


def main() -> None:
    """Interleaves the cases, so that a slow moment of the machine hits all, and shows the median of each."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name, code in CASES.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - started)
    median = {name: sorted(times)[ROUNDS // 2] for name, times in seconds.items()}
    table = Table(title=f"Start-up, median of {ROUNDS} fresh processes", title_justify="left")
    for column in ("case", "seconds", "of the peer"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, value in median.items():
        table.add_row(name, f"{value:.2f}", f"{value / median['peer: import SFTTrainer']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
