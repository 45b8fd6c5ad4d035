"""Largest numbers and longest texts that a person may write: what is beyond is a slip, and would cost hours
or overflow.

Each limit is far above anything that a run has used; a plan says what a value within it needs. Three limits
are of small numbers: below them a run would train without an effect.
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
RETRIES = 10
"""Attempts of a task after the first: Flyte's own limit."""
EPOCHS = 10**6
LEARNING_RATE = 1000.0
LEAST_LEARNING_RATE = 1e-12
"""Smaller steps are lost in float32 beside weights of any size that models have."""
LEAST_FACTOR = 1e-6
"""Smallest factor of a loss or of its gradients (weights, beta, max_grad_norm) that is not 0: AdamW's epsilon
is 1e-8."""
LEAST_MINUTES = 0.01
"""Shortest limit of a time that a run waits: 0.6 s."""
LEAST_SECONDS = 0.01
LEAST_TEMPERATURE = 1e-3
"""Logits that are divided by less are the most probable token alone."""
LARGEST_TEMPERATURE = 100.0
LEAST_NUMBER = 1e-30
"""Smaller numbers than this one that are not 0 are a slip wherever they are: float32 rounds 1e-46 to 0."""
DROPOUT = 0.99
"""Largest share of an adapter's inputs that are dropped out."""
DECAY = 0.999999
"""Largest decay rate of a moment; float32 rounds 0.99999998 to 1, with which a moment stays 0."""
EPSILON = 1.0
"""Largest epsilon of AdamW, which bounds its steps to gradient / epsilon."""
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
"""numpy's largest seed; it refuses negative ones."""
IMAGE_BYTES = 10**8
"""Bytes of the file of an image."""
PIXELS = 10**8
"""Pixels of an image; at three bytes each they take 300 MB when it is opened."""
TEXT = 100_000
"""Characters of a text: a system prompt, a description."""
PATH = 4096
"""Characters of a path or address (Linux's PATH_MAX)."""
NEGATIVES = 64
"""Documents of a row that do not belong to its query."""
NAME = 255
"""Bytes of a name in a path (Linux's NAME_MAX)."""
