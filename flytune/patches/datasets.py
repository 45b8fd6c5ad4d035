"""Names of datasets that are replaced."""

from flytune.patches.record import BlockPatch

CACHE = BlockPatch(
    name="datasets.config:HF_DATASETS_CACHE",
    version="5.2.0",
    reason="the harness's data sets are kept in a folder of the stage; the variable is read at import",
    upstream=("datasets.load:load_dataset_builder", "datasets.builder:DatasetBuilder.__init__"),
    remove_when="the harness hands `cache_dir` on to `load_dataset` for all tasks",
)
