"""Completion in the shell, by the shell itself."""

import subprocess

from flytune.cli import main


def test_commands_and_their_options_are_completed(capsys):
    assert main(["completion"]) == 0
    script = capsys.readouterr().out

    def completed(*words):
        line = (
            f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _flytune; echo ${{COMPREPLY[@]}}"
        )
        done = subprocess.run(
            ["bash", "-uc", f"{script}\n{line}"], capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert completed("flytune", "ch") == ["chat"]
    assert set(completed("flytune", "plan", "--s")) == {"--set", "--shape", "--svg", "--samples", "--solve"}
    assert completed("flytune", "plan", "rec") == [], "bash completes names of files then"
