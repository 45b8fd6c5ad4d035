"""Data: from what a recipe names to tokenized parquet shards, on a CPU and without torch.

sources, hub      where the data lies, and a fingerprint of what it holds
reading           files -> rows
formats, messages rows -> chats, prompts with completions, or tokens
templates, rendering  -> text, and which of its characters are trained
tokenizing        -> input_ids and labels
packing           -> blocks of whole samples, where the recipe asks for it
sampling          all of that, for a chunk of rows, cut to max_length
workers, mixing   chunks of all sources, on all cores, in order
bad_rows          rows that are set aside, with their reasons
progress          what a killed run goes on from
preparing, summing    -> split, shards, manifest
contract, clauses what the stored samples must be (samples, census, duplicates)
shards            the stored files, written and loaded
"""

from flytune.data.preparation import prepare
from flytune.data.shards import load, read_manifest
from flytune.data.sources import fingerprint

__all__ = ["fingerprint", "load", "prepare", "read_manifest"]
