"""Progress bars with and without a terminal, and useless warnings."""

import io
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
from tqdm.auto import tqdm

from flytune.console import output

INSTALL = "from flytune.console import output; output.install()"
BARS = """
from flytune.console import output
output.install()
from huggingface_hub.utils import tqdm as hub_tqdm
from tqdm import tqdm
from tqdm.auto import tqdm as auto_tqdm
from transformers.utils import logging

for name, bar in {"ours": tqdm, "auto": auto_tqdm, "hub": hub_tqdm, "transformers": logging.tqdm}.items():
    for _ in bar(range(500), desc=name, mininterval=0, delay=0, disable=None):
        pass
with tqdm(total=3, desc="outer", mininterval=0, delay=0) as outer:
    for _ in range(3):
        for _ in tqdm(range(50), desc="inner", leave=False, mininterval=0, delay=0):
            pass
        outer.update()
        tqdm.write("written")
for _ in tqdm(range(500), desc="short", delay=600):
    pass
"""


def said(code, **environment):
    command = [sys.executable, "-c", code]
    # One stream for both, as in a pod's log.
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout.decode()
    return done.stdout.decode()


def test_without_a_terminal_every_bar_is_a_line_at_its_start_and_one_at_its_end():
    text = said(BARS)
    assert "\r" not in text
    assert "\x1b" not in text
    shown = [line.partition(":")[0] for line in text.splitlines()]
    once = [name for name in ("ours", "auto", "hub", "transformers") for _ in range(2)]
    assert shown == [*once, "outer", *["inner", "inner", "written"] * 3, "outer"]
    assert "ours: 100%|" in text
    assert "500/500" in text


def test_of_a_node_s_ranks_the_first_shows_bars():
    assert said(BARS, LOCAL_RANK="1") == "written\n" * 3


def test_on_a_terminal_bars_are_drawn_in_place():
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    code = (
        f"{INSTALL}\n"
        "from tqdm import tqdm\n"
        "for _ in tqdm(range(50), desc='bar', mininterval=0, delay=0): pass"
    )
    subprocess.run([sys.executable, "-c", code], stdout=end, stderr=end, check=True)
    os.close(end)
    text = ""
    with suppress(OSError):  # at its end
        while part := os.read(terminal, 65536):
            text += part.decode(errors="replace")
    os.close(terminal)
    assert text.count("\rbar: ") > 40


@pytest.fixture
def clock(monkeypatch):
    output.install()
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_between_start_and_end_there_is_a_line_every_30_seconds_at_most(clock):
    log = io.StringIO()
    with tqdm(total=1000, desc="long", file=log, mininterval=0, miniters=1, delay=0) as bar:
        for _ in range(1000):
            clock.seconds += 0.1
            bar.update()
            bar.set_postfix_str("x")
    # 100 seconds: the start, three lines, the end.
    steps = [int(found) for found in re.findall(r"(\d+)/1000", log.getvalue())]
    assert (steps[0], steps[-1], len(steps)) == (0, 1000, 5)
    assert min(later - earlier for earlier, later in pairwise(steps[:-1])) >= 299


def test_a_bar_that_ends_early_says_how_far_it_came(clock):
    log = io.StringIO()
    with pytest.raises(KeyError), tqdm(total=10, desc="broken", file=log, delay=0) as bar:
        bar.update(4)
        raise KeyError
    assert [" 0/10 " in line for line in log.getvalue().splitlines()] == [True, False]
    assert " 4/10 " in log.getvalue()


def test_a_bar_that_was_over_before_it_was_shown_is_one_line(clock):
    log = io.StringIO()
    with tqdm(total=1, desc="late", file=log, delay=1e-9, mininterval=0) as bar:
        bar.update()
    assert log.getvalue().count("\n") == 1


OF_LIBRARIES = """
from datasets.utils import tqdm as datasets_tqdm
from flytune.console import output
output.install()
from huggingface_hub.utils import tqdm as hub_tqdm
from transformers.utils import logging

for bar in (hub_tqdm, datasets_tqdm, logging.tqdm):
    for _ in bar(range(500), desc="over at once", mininterval=0):
        pass
output.DELAY = 1e-9
for title in ("Writing model shards", "Loading weights"):
    for _ in logging.tqdm(range(3), desc=title, mininterval=0):
        pass
"""


def test_a_library_s_bar_is_shown_when_it_takes_long_and_never_for_a_save():
    assert [line.partition(":")[0] for line in said(OF_LIBRARIES).splitlines()] == ["Loading weights"] * 2


NOTICES = """
import logging, warnings
from flytune.console import output
output.install()
deprecated = "`is_gradient_checkpointing` is deprecated and will be removed in v6. Use the other"
warnings.warn(deprecated, FutureWarning)
warnings.warn("`torch.distributed.all_gather_into_tensor` is deprecated. Please use another", FutureWarning)
paged = "Paged optimizers are not supported on CPU. Falling back to non-paged optimizer behavior."
warnings.warn(paged, UserWarning)
of_bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
of_bitsandbytes.warning("Failed to load CPU gemm_4bit_forward: it is not there")
warnings.warn("an autograd kernel was not registered", UserWarning)
warnings.warn("The parameter --trust_remote_code is used more than once. Remove its duplicate", UserWarning)
of_loading = logging.getLogger("transformers.modeling_utils")
of_loading.warning("Llama LOAD REPORT from: x\\nscore.weight | MISSING |")
elastic = logging.getLogger("torch.distributed.elastic.agent.server.api")
elastic.warning("Received %s death signal, shutting down workers", 2)
of_loading.warning("Llama LOAD REPORT from: x\\na.weight | MISMATCH |")
of_trainer = logging.getLogger("transformers.trainer_utils")
warning = "The following arguments do not match the ones in the `trainer_state.json` within the "
warning += "checkpoint directory: "
of_trainer.warning(warning + "\\n\\tper_device_train_batch_size: 1")
of_trainer.warning(warning + "\\n\\tsave_steps: 2 (from args)\\n\\tper_device_train_batch_size: 1")
logging.getLogger("bitsandbytes").warning("something else")
"""


def test_a_bar_that_nobody_closes_makes_no_noise_at_the_end():
    code = (
        f"{INSTALL}\n"
        "from tqdm import tqdm\n"
        "bar = tqdm(total=2, desc='left', delay=0)\n"
        "bar.update()\n"
        "bar.kept = [bar]"
    )
    assert [line.split()[0] for line in said(code).splitlines()] == ["left:", "left:"]


def test_a_fork_that_ends_while_it_writes_a_bar_keeps_no_lock():
    code = (
        f"{INSTALL}\n"
        "import os\n"
        "from tqdm import tqdm\n"
        "fork = os.fork()\n"
        "if fork == 0:\n"
        "    tqdm.get_lock().acquire()\n"
        "    os._exit(0)\n"
        "os.waitpid(fork, 0)\n"
        "assert tqdm.get_lock().acquire(blocking=False)"
    )
    said(code)


def test_notices_of_no_use_are_silent_and_all_others_are_not():
    lines = said(NOTICES).splitlines()
    assert len(lines) == 7
    assert lines[2] == "a.weight | MISMATCH |"
    assert "do not match the ones in" in lines[3]
    assert "save_steps: 2" in lines[4]
    assert "an autograd kernel was not registered" in lines[0]
    assert lines[-1] == "something else"
