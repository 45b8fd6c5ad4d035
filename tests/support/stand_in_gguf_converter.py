#!/usr/bin/env python3
"""Stand-in for llama.cpp's convert_hf_to_gguf.py: checks how it is called, and writes the first bytes of a
GGUF file."""

import argparse
import os
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("--outfile", type=Path, required=True)
parser.add_argument(
    "--outtype", choices=("f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto"), required=True
)
options = parser.parse_args()
if not (options.model / "config.json").is_file() or not list(options.model.glob("*.safetensors")):
    sys.exit(f"{options.model}: no model")
if os.environ.get("STAND_IN_FAILS"):
    sys.exit("NotImplementedError: BPE pre-tokenizer was not recognized")
if not os.environ.get("STAND_IN_WRITES_NOTHING"):
    options.outfile.write_bytes(b"GGUF" + options.outtype.encode())
