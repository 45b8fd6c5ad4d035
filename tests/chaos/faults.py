"""Kinds of faults and their moments, drawn from a seed with equal frequency."""

import random
from typing import NamedTuple

# Kinds after which the pod has ended, with descriptions.
KILLS = {
    "rank killed": "SIGKILL of one rank",
    "agent killed": "SIGKILL of the process that starts the ranks, which are killed up to 3 s later, during "
    "the next attempt",
    "pod killed": "SIGKILL of all processes",
    "SIGTERM": "SIGTERM without a limit of time",
    "SIGTERM, short": "SIGTERM; SIGKILL of all processes follows within 0.4 s",
    "file cut": "pod killed; a file of the newest checkpoint loses its second half",
    "bit flipped": "pod killed; one bit of a file of the newest checkpoint is flipped",
    "file missing": "pod killed; a file of the newest checkpoint is deleted",
}
# Kinds that the pod may survive.
LIVES = {
    "two alive": "a second attempt starts; one of the two is killed up to 2 s after the second's first step",
    "frozen": "SIGSTOP of all processes for 1 to 4 s",
}
CHANGES = {
    "other base": "pod killed; an attempt with another base starts, which is refused where there is a "
    "checkpoint",
    "other batch": "pod killed; an attempt with another global batch starts, which is refused where there is "
    "a checkpoint",
    "other setting": "pod killed; an attempt with another learning rate trains two steps, and is killed "
    "before it saves",
}
"""Kinds that begin an attempt with another recipe, of which nothing may be left in what the run trains
afterwards."""
OF_REWARDS = {
    "other reward": "pod killed; an attempt with another reward trains two steps, and is killed before it "
    "saves"
}
REFUSED = ("other base", "other batch")
ON_DISK = {
    "disk full": "no file can grow beyond 64 kB (RLIMIT_FSIZE, a stand-in for a full disk) for 1 to 4 s"
}
ON_S3 = {
    "S3 errors": "503 to all requests for 1 to 6 s",
    "S3 cut": "connections end in the middle of uploads for 1 to 6 s",
    "S3 stalls": "no answer for 1 to 6 s",
    "S3 full": "writes are refused (QuotaExceeded) for 1 to 6 s",
}
ALL = KILLS | LIVES | CHANGES | OF_REWARDS | ON_DISK | ON_S3

MOMENTS = ("start", "step", "step", "saving", "storing")
"""Moments: in the first seconds; after a step; when the Trainer's checkpoint folder appears; when its first
file is stored."""
OF_DRAWING = ("recorded", "recorded")
"""Further moments of runs that draw their answers: when those of a step are recorded, and not trained yet.
Faults after a step mostly fall into the drawing of the next one."""


class Fault(NamedTuple):
    """One fault."""

    kind: str
    moment: str
    steps: int
    """Number of steps that the attempt may do before the moment."""
    delay: float
    """Delay after the moment, in seconds."""
    seconds: float
    """Duration as a share of the longest one, 0 to 1."""


class Bag:
    """Draws faults until the bag is empty, then fills it again."""

    def __init__(self, draw: random.Random, has_rewards: bool = False, draws_answers: bool = False) -> None:
        self._draw = draw
        self._usual = KILLS | LIVES | CHANGES | (OF_REWARDS if has_rewards else {})
        self._moments = MOMENTS + OF_DRAWING * draws_answers
        self._kinds: dict[bool, list[str]] = {True: [], False: []}

    def next(self, on_s3: bool) -> Fault:
        """Draw the next fault for a run with checkpoints on S3 or in a folder."""
        draw, kinds = self._draw, self._kinds[on_s3]
        if not kinds:
            kinds.extend(self._usual | (ON_S3 if on_s3 else ON_DISK))
            draw.shuffle(kinds)
        kind = kinds.pop()
        moment = draw.choice(self._moments)
        if kind in ON_S3 | ON_DISK and moment == "start":
            moment = "saving"
        delay = (
            draw.uniform(0, 3)
            if moment == "start"
            else draw.uniform(0, 0.2)
            if moment == "step"
            else draw.uniform(0, 0.05)
        )
        return Fault(kind, moment, draw.randrange(4), delay, draw.random())
