"""The README's twenty lines, on a config.json of somebody's own, in a process that cannot import Flytune."""

import json
import os
import re
import subprocess
import sys

from tests.support.paths import ROOT

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def test_the_example_runs_on_a_config_of_ones_own(tmp_path):
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "training_estimates/README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "training_estimates").symlink_to(ROOT / "training_estimates")
    hidden = "import sys; sys.modules.update(dict.fromkeys(('flytune', 'torch', 'transformers')))\n"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", hidden + code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, memory, seconds = done.stdout.splitlines()
    # Llama 3 8B has 8,030,261,248 parameters; 16 bytes of each are divided by 8 GPUs.
    assert size == "8.03 billion parameters"
    needed = float(re.search(r"needs ([\d.]+) of 79.2 GiB", memory)[1])
    assert 8.03e9 * 16 / 8 / 2**30 < needed < 40
    # 6 operations a parameter and token, and a forward pass again: at the rate that is measured of the H100.
    least = 8 * 4096 * 8 * 7.5e9 / 794.5e12
    assert least < float(re.match(r"([\d.]+) s a step", seconds)[1]) < 3 * least
