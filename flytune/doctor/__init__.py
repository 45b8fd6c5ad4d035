"""Checks of this machine and of a cluster before a run, with advice.

laptop.py, admin.py and kube.py collect facts; each is judged separately, in one finding. control_plane.py has the client of
Flyte 1, flyte2.py that of Flyte 2.
"""

from flytune.doctor.finding import Finding

__all__ = ["Finding", "admin", "control_plane", "finding", "flyte2", "kube", "laptop"]
