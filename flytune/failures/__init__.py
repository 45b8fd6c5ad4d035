"""Kinds of failures, which of them are retried, and how ranks report them."""

from flytune.addresses import redact as without_secrets
from flytune.failures.reports import Failure
from flytune.failures.table import kind_of
from flytune.failures.text import FailureText, first_line, shortened, task_name

__all__ = ["Failure", "FailureText", "first_line", "kind_of", "shortened", "task_name", "without_secrets"]
