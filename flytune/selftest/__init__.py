"""The self-test, `flytune selftest`: each pair of method and sharding must compute the same as plain
training.

processes     a function in several forked processes
tiny_model    the model
tiny_vision   the one that reads images
dataset       its training data
runs          one run in a given layout
shapes        the machine that the self-test runs on
compare       differences between two runs
matrix        all pairs
table         the matrix as a table

docs/equality.md explains the comparison and its tolerances.
"""

from flytune.selftest.matrix import Matrix
from flytune.selftest.processes import Nodes, RankFailed
from flytune.selftest.runs import Trials
from flytune.selftest.tiny_model import random_model, train_tokenizer

__all__ = ["Matrix", "Nodes", "RankFailed", "Trials", "random_model", "train_tokenizer"]
