"""Checks of this machine and of a cluster before a run, with advice.

laptop.py, admin.py, flyte2.py and kube.py collect facts; each is judged separately, in one finding.
"""

from flytune.doctor.finding import Finding

__all__ = ["Finding"]
