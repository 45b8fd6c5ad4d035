"""Tests that compare what a model computes, run as on other CPUs (`make test-cpus`): the verdict must be the
same on each.

python -m tests.numerical                          # all of them, as on each of CPUS
python -m tests.numerical --cpus avx2 -k packing   # further options are pytest's
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

FILES = [
    "adapters/test_load.py",
    "adapters/test_merge.py",
    "artifacts/test_opening.py",
    "artifacts/test_publish_checkpoints.py",
    "artifacts/test_serving.py",
    "conversion/test_training.py",
    "data/test_order.py",
    "data/test_packing.py",
    "end_to_end/test_experts.py",
    "end_to_end/test_failures.py",
    "end_to_end/test_from_recipe_to_answers.py",
    "end_to_end/test_releases.py",
    "end_to_end/test_resumed_run.py",
    "end_to_end/test_two_pods.py",
    "evaluation/test_harness.py",
    "evaluation/test_score.py",
    "export/test_gate.py",
    "inference/test_batch.py",
    "models/test_adapter_kinds.py",
    "models/test_initial_adapter.py",
    "models/test_model_types.py",
    "models/test_own_logits.py",
    "models/test_quantized.py",
    "models/test_sharded_loading.py",
    "models/test_vocabulary.py",
    "objectives/test_contract.py",
    "objectives/test_dpo.py",
    "objectives/test_grpo.py",
    "objectives/test_kto.py",
    "objectives/test_reward.py",
    "registry/test_refresh.py",
    "rollouts/test_sampling.py",
    "selftest/test_selftest.py",
    "tasks/test_run.py",
    "tasks/test_secrets.py",
    "training/test_earlier_attempts.py",
    "training/test_bitsandbytes_states.py",
    "training/test_checkpoints_run.py",
    "training/test_export_best.py",
    "training/test_learning_guard.py",
    "training/test_loop.py",
    "training/test_loss_check.py",
    "training/test_loss_guards.py",
    "workflows/test_sft_then_dpo.py",
]
"""The files of these tests, which have the marker `numerical`."""

CPUS = {
    # Without vector instructions beyond SSE, sums in another order, and two threads, which split sums once
    # more.
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_NUM_THREADS": "2",
    },
    # Most CPUs without AVX-512, among them AMD's before Zen 4 and those of laptops.
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    },
}
"""The variables by which torch's own kernels, those of oneDNN, MKL and numpy's OpenBLAS are chosen; they can
only lower."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.numerical", description=__doc__.splitlines()[0])
    parser.add_argument("--cpus", nargs="+", choices=CPUS, default=list(CPUS))
    given, options = parser.parse_known_args()
    for cpu in given.cpus:
        print(f"as on a CPU: {cpu}", flush=True)  # noqa: T201
        folder = Path(__file__).parent
        command = [sys.executable, "-m", "pytest", "-m", "numerical and not release and not gpu", *options]
        if done := subprocess.run(
            [*command, *(str(folder / file) for file in FILES)], env=os.environ | CPUS[cpu]
        ).returncode:
            sys.exit(done)


if __name__ == "__main__":
    main()
