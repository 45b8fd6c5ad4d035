"""Data preparation: from the sources in a recipe to tokenized parquet shards, on a CPU and without torch.

sources, hub           location of the data, and a fingerprint of its content
windows                paths with one file a day or an hour
readers                files -> rows
columns, row_forms     names of columns, of all tools; rows of other tools
rows                   the kinds of rows: answers (long ones in pieces), pairs, labelled answers
formats, messages      rows -> chats, prompts with completions, or tokens
chat_template, thoughts, render
                       -> text, with the characters that are trained
control_tokens, labels -> input_ids and labels
image_rows             images of rows
process                all of these steps for a chunk of rows, cut to max_length
left_out, missing_values
                       content of rows that is in no sample, or is most likely none
packing                -> blocks of complete samples, with data.packing; batches of them
workers, mixture       chunks of all sources, on all cores, in order
bad_rows, counts       rows that are set aside, with their reasons; counts of each source
progress               the state from which a killed run resumes
shards, stored_samples the stored files, written and loaded; their samples as arrays
preparation            the complete preparation
contract, check        checks of the stored samples
order                  the order of samples in training
tokenizer              the base's tokenizer, with the recipe's changes
harness_tasks          a recipe's own tasks of lm-evaluation-harness
"""

from flytune.data.bad_rows import BadRows
from flytune.data.messages import text_of, tools_of
from flytune.data.order import Stream
from flytune.data.packing import Collator, pack, tokens_of
from flytune.data.preparation import prepare
from flytune.data.progress import Progress, digest_of
from flytune.data.readers import read_path
from flytune.data.rows import ROW_KINDS, row_kind, weight_advice
from flytune.data.shards import heldout_rows, heldout_sources, load, read_manifest
from flytune.data.sources import fingerprint
from flytune.data.stored_samples import StoredSamples
from flytune.data.tokenizer import load_tokenizer, require_chat_template, stored_tokenizer

__all__ = [
    "ROW_KINDS",
    "BadRows",
    "Collator",
    "Progress",
    "StoredSamples",
    "Stream",
    "digest_of",
    "fingerprint",
    "heldout_rows",
    "heldout_sources",
    "load",
    "load_tokenizer",
    "pack",
    "prepare",
    "read_manifest",
    "read_path",
    "require_chat_template",
    "row_kind",
    "stored_tokenizer",
    "text_of",
    "tokens_of",
    "tools_of",
    "weight_advice",
]
