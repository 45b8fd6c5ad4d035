"""What strikes, and when: drawn from a seed, all kinds as often."""

import random
from typing import NamedTuple

# Whether the pod is gone after it, and what it is.
KILLS = {
    "rank killed": "SIGKILL of one rank",
    "agent killed": "SIGKILL of the process that started the ranks; those are killed up to 3 s later, beside the next attempt",
    "pod killed": "SIGKILL of all processes",
    "SIGTERM": "and as long as it takes",
    "SIGTERM, short": "SIGKILL of all follows within 0.4 s",
    "file cut": "pod killed; a file of the newest checkpoint loses its second half",
    "bit flipped": "pod killed; in a file of the newest checkpoint",
    "file missing": "pod killed; of the newest checkpoint",
}
LIVES = {
    "two alive": "a second attempt starts; one of the two is killed up to 2 s after the second's first step",
    "frozen": "SIGSTOP of all processes for 1 to 4 s",
}
ON_DISK = {"disk full": "no file can grow beyond 64 kB (RLIMIT_FSIZE, which stands for a full disk) for 1 to 4 s"}
ON_S3 = {
    "S3 errors": "503 to all requests for 1 to 6 s",
    "S3 cut": "connections end in the middle of uploads for 1 to 6 s",
    "S3 stalls": "no answer for 1 to 6 s",
    "S3 full": "writes are refused (QuotaExceeded) for 1 to 6 s",
}
ALL = KILLS | LIVES | ON_DISK | ON_S3

MOMENTS = ("start", "step", "step", "saving", "storing")
"""In the first seconds; after a step; when the Trainer's folder of a checkpoint appears; when its first file is stored."""


class Fault(NamedTuple):
    """One of them."""

    kind: str
    moment: str
    steps: int
    """Steps that the attempt is first let do."""
    delay: float
    """Seconds after the moment."""
    seconds: float
    """That it lasts, where it lasts; 0 to 1, a share of the most."""


class Bag:
    """Draws faults until the bag is empty, then fills it again."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._kinds: dict[bool, list[str]] = {True: [], False: []}

    def next(self, on_s3: bool) -> Fault:
        """The next fault for a run whose checkpoints lie on S3, or in a folder."""
        draw, kinds = self._draw, self._kinds[on_s3]
        if not kinds:
            kinds.extend(KILLS | LIVES | (ON_S3 if on_s3 else ON_DISK))
            draw.shuffle(kinds)
        kind = kinds.pop()
        moment = draw.choice(MOMENTS)
        if kind in ON_S3 | ON_DISK and moment == "start":
            moment = "saving"
        delay = draw.uniform(0, 3) if moment == "start" else draw.uniform(0, 0.2) if moment == "step" else draw.uniform(0, 0.05)
        return Fault(kind, moment, draw.randrange(4), delay, draw.random())
