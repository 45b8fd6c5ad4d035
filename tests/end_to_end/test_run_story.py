"""Everything that a run prints, from `flytune run` on: the story in its order, and nothing else."""

import os
import re

import pytest
import yaml

from tests.support import interrupted
from tests.support.faults import planted
from tests.support.preferences import write_preferences
from tests.support.pyflyte import pyflyte_run
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

pytestmark = pytest.mark.slow

STEP = r"step \d+/\d+  (?:loss .* eta [\d:]+|eval_loss [\d.]+ nats per token of 8 held-out samples)"
PLAN = (
    r"tiny: plan: full, sharding {0}, on cpu-{1}: 4 samples a step \(.*\), [\d,]+ steps; .* \(fits\), "
    r"\$0.00 an hour"
)
DATA = r"tiny: data: \d+ samples to train on, \d+ held out, of 60 rows"
SAVED = r"tiny: Ctrl-C: step (\d+) is saved; the same command resumes from it \((\S+)\)"

BAR = re.compile(r"\d%\|")
"""In a line of a bar: one is printed where its work takes long (tests/console/test_output.py)."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_base(folder), write_pairs(folder / "pairs.jsonl", 60)


def recipe(inputs, folder, **changes):
    own = {
        "checkpoints.folder": str(folder / "kept"),
        "checkpoints.save_steps": 4,
        "publish.address": str(folder / "store"),
    }
    return tiny_recipe(*inputs, own | changes)


def told(text, lines):
    """Check that all of a text's lines, steps and bars left out, match patterns in their order; return the
    groups found."""
    seen = [
        line for line in text.splitlines() if line and not re.fullmatch(STEP, line) and not BAR.search(line)
    ]
    found = [re.fullmatch(pattern, line) for pattern, line in zip(lines, seen, strict=False)]
    wrong = next((at for at, one in enumerate(found) if one is None), len(found))
    assert len(seen) == len(lines) == wrong, f"{lines[wrong : wrong + 1]}, but the lines are\n" + "\n".join(
        seen[wrong:]
    )
    return [one.groups() for one in found]


def beginning(folder, sharding="none", processes=1):
    return [
        PLAN.format(sharding, processes),
        DATA,
        rf"tiny: checkpoints: every 4 steps, the last 2 are kept, in {folder}/kept/tiny-\S+",
    ]


INTERRUPTED = [
    "Ctrl-C: this step is completed and saved; press Ctrl-C again to end without",
    r"trained \d+ steps in [\d:]+  .*",
    SAVED,
]


@pytest.mark.journey
def test_a_run_that_is_interrupted_and_started_again_tells_its_story_and_nothing_else(inputs, tmp_path):
    # The threshold is above any loss: the second evaluation ends the run.
    ends = {
        "evaluation.eval_steps": 12,
        "evaluation.early_stopping_patience": 1,
        "evaluation.early_stopping_threshold": 100.0,
    }
    written = recipe(inputs, tmp_path, **ends, **{"training.max_steps": 400})
    # It is pressed before step 10 ends.
    code, said = interrupted.run(written, tmp_path, until="^step 9/", seen=planted("wait 0 10"), forks=True)
    assert code == 130
    (step, address) = told(said, ["Running Execution on local.", *beginning(tmp_path), *INTERRUPTED])[-1]
    assert step == "10"

    code, said = interrupted.run(written, tmp_path)
    assert code == 0, said
    lines = [
        *beginning(tmp_path),
        re.escape(f"attempt 2: resumes at step {step} from {address}; attempt 1: ended by Ctrl-C, node ")
        + ".*",
        r"evaluation.early_stopping_patience: 1 evaluation in a row did not lower eval_loss by more than 100 "
        r"\(lowest: .*\); training ended after step 24",
        r"trained \d+ steps in .*; steps 1 to " + step + " are of earlier attempts",
        r"exports step 24 of 24: eval_loss .*",
        r"gate loss .*",
        r"2 attempts: 24 steps in .*",
        r"held-out perplexity  .*",
        r"held-out loss  .*",
        rf"tiny: artifact: ({tmp_path}/store/tiny-[0-9a-f]{{12}})",
        rf"report: ({tmp_path}/store/tiny-[0-9a-f]{{12}}/report.html)",
        rf"({tmp_path}/store/tiny-[0-9a-f]{{12}})",
    ]
    (artifact,), (report,), (last,) = told(said, lines)[-3:]
    assert artifact == last
    assert report == f"{artifact}/report.html"
    assert os.path.isfile(report)


def test_ranks_save_the_same_step_and_say_nothing_of_signals(inputs, tmp_path):
    changes = {"training.max_steps": 20_000, "sharding": "ddp", "hardware.shape": "cpu-2"}
    code, said = interrupted.run(recipe(inputs, tmp_path, **changes), tmp_path, until="^step 6/")
    assert code == 130
    step, address = told(said, [*beginning(tmp_path, "ddp", 2), *INTERRUPTED])[-1]
    assert int(step) >= 6
    assert [name for name in os.listdir(address) if name.startswith(f"{step}-")]


def test_before_the_first_step_and_without_checkpoints_ctrl_c_says_so(inputs, tmp_path):
    written = recipe(inputs, tmp_path, **{"training.max_steps": 20_000})
    code, said = interrupted.run(written, tmp_path, until="^tiny: plan: ")
    assert code == 130
    assert (
        said.splitlines()[-1] == "tiny: Ctrl-C: no step is saved yet; the same command starts again at step 0"
    )
    code, said = interrupted.run(written | {"checkpoints": {}}, tmp_path, until="^step 4/")
    assert code == 130
    assert said.splitlines()[-1] == (
        "tiny: Ctrl-C: no checkpoints are written (checkpoints.save_steps is not set); the same command "
        "starts again at step 0"
    )
    assert "Traceback" not in said


def test_a_sweep_says_which_point_runs_and_inference_where_the_answers_are(inputs, tmp_path):
    written = tiny_recipe(*inputs, {"method": "lora", "publish.address": str(tmp_path / "store")})
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(written))
    process, log = interrupted.start(
        ["run", tmp_path / "sweep.yaml", "--grid", '{"method.r": [2, 4]}'], tmp_path
    )
    assert process.wait(interrupted.SECONDS) == 0, log.read_text()
    points = [rf"point {number} of 2: tiny-{number} (method.r {r})" for number, r in ((1, 2), (2, 4))]
    said = log.read_text()
    named = [line for line in said.splitlines() if re.search(r"^(?:\w+, )?point ", line)]
    assert named == [*points, *points], "once as it is planned, once as it runs"
    assert re.search(rf"^tiny-2: artifact: {tmp_path}/store/tiny-2-[0-9a-f]{{12}}$", said, re.MULTILINE)
    *_, result, report, last = said.splitlines()
    assert result == f"tiny: sweep: {last}"
    assert re.fullmatch(rf"{os.environ['FLYTUNE_OUT']}/tiny-sweep-[0-9a-f]{{12}}", last)
    assert report == f"report: {last}/report.html"

    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "Question 3: add the numbers."}\n')
    artifact = next((tmp_path / "store").iterdir())
    (folder := tmp_path / "infer").mkdir()
    arguments = [
        "workflows/infer.py",
        "infer",
        "--artifact",
        artifact,
        "--prompts",
        prompts,
        "--shape",
        "cpu-1",
    ]
    done = pyflyte_run([*arguments, "--scratch_folder", folder / "parts"], folder)
    assert done.returncode == 0, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not BAR.search(line)]
    assert lines[1].startswith("part-00000.jsonl: 1 prompt, ")
    assert lines == [
        "Running Execution on local.",
        lines[1],
        f"answers: {lines[-1]}",
        lines[-1],
    ]


def test_a_reward_model_s_drawn_head_is_no_news(inputs, tmp_path):
    pairs = write_preferences(tmp_path / "pairs.jsonl", 40)
    written = tiny_recipe(inputs[0], pairs, {"objective": "reward", "method": "lora"})
    code, said = interrupted.run(written, tmp_path)
    assert code == 0, said
    assert not re.search(r"(?i)warn|missing|\[transformers\]", said)
