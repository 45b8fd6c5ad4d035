"""What is wrong with a laptop or a cluster before a run finds out, and what to do about it.

Facts are looked up (laptop.py, admin.py, kube.py) and judged apart from that, each in one finding.
"""

from flytune.doctor.finding import Finding, Level

__all__ = ["Finding", "Level"]
