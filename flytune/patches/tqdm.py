"""Name of tqdm that is replaced."""

from flytune.patches.record import ProcessPatch

BAR = ProcessPatch(
    name="tqdm.std:tqdm.__init__",
    version="4.70.1",
    reason="without a terminal a bar writes carriage returns into one endless line of the log; with it, a "
    "line every 30 s",
    upstream=(
        "tqdm.std:tqdm.__init__",
        "tqdm.std:tqdm.update",
        "tqdm.std:tqdm.display",
        "tqdm.std:tqdm.close",
    ),
    remove_when="tqdm writes lines where there is no terminal, or a variable names the file and the delay of "
    "all bars",
)
