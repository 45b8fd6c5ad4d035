"""Data: from what a recipe names to tokenized parquet shards, on a CPU and without torch.

sources, hub      where the data lies, and a fingerprint of what it holds
reading           files -> rows
formats, messages rows -> chats, prompts with completions, or tokens
rendering         -> text, and which of its characters are trained
tokenizing        -> input_ids and labels
packing           -> blocks of whole samples, where the recipe asks for it
sampling          all of that, for the rows of one source, cut to max_length
bad_rows          rows that are set aside, with their reasons
preparing         -> split, shards, manifest
contract, clauses what the stored samples must be (samples, census, duplicates)
shards            the stored files, written and loaded
"""

from flytune.data.preparing import prepare
from flytune.data.shards import load, read_manifest
from flytune.data.sources import fingerprint

__all__ = ["fingerprint", "load", "prepare", "read_manifest"]
