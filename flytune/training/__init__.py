"""The training loop, its callbacks, and checkpoints."""

from flytune.training.phase_notes import PhaseNote, PhaseNotes

__all__ = ["PhaseNote", "PhaseNotes", "attempt_notes", "checkpoints", "loop", "phase_notes", "preemption"]
