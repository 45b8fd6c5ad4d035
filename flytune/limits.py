"""Largest numbers and longest texts that a person may write: what is beyond is a slip, and would cost hours or overflow.

Each limit is far above anything that a run has used; a plan says what a value within it needs.
"""

COUNT = 10**9
"""Steps, ranks, evaluations and all counts without a limit of their own."""
ROWS = 10**12
"""Rows of data."""
BATCH = 10**7
"""Samples of an optimizer step; GPT-3's had 1,600, the largest published ones some 30,000."""
MICRO_BATCH = 2**16
"""Samples of a forward pass."""
TOKENS = 2**24
"""Tokens of a sample or an answer."""
LISTED = 10_000
"""Entries of a list: sources, tasks, layers, tokens."""
ADDED_TOKENS = 100_000
"""Tokens that a recipe adds, or trains the rows of."""
SHARDS = 10_000
"""Pods that one task is divided over, processes of a node, nodes."""
EPOCHS = 10**6
LEARNING_RATE = 1000.0
FACTOR = 1e9
"""Norms, margins, thresholds and other numbers that multiply or bound."""
MINUTES = 10**7
"""19 years."""
HOURS = 10**6
"""114 years."""
SECONDS = 10**9
PRICE = 1e12
GIB = 10**9
"""GiB of a memory or a disk: an exbibyte."""
RATE = 1e9
"""TFLOP/s, GB/s."""
SEED = 2**32 - 1
"""numpy's largest seed; negative ones are errors of it."""
TEXT = 100_000
"""Characters of a text: a system prompt, a description."""
PATH = 4096
"""Characters of a path or address (Linux's PATH_MAX)."""
NAME = 255
"""Bytes of a name in a path (Linux's NAME_MAX)."""
