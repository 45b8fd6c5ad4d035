"""One file for each JSON that stages hand on: plan, dataset, training, metrics, export, contents, comparison."""

from flytune.records import environment
from flytune.records.comparison import Comparison
from flytune.records.contents import Contents, StoredFile
from flytune.records.dataset import Bin, Manifest, Shard, SourceCounts, SplitCounts
from flytune.records.export import Export
from flytune.records.metrics import Answer, LabelReward, Metrics, Part, Preference, RewardScore, Score, TaskScore, Wins
from flytune.records.plan import Calibration, Interruptions, Loading, Need, Plan
from flytune.records.training import GpuUse, Step, TrainingResult

__all__ = [
    "Answer",
    "Bin",
    "Calibration",
    "Comparison",
    "Contents",
    "Export",
    "GpuUse",
    "Interruptions",
    "LabelReward",
    "Loading",
    "Manifest",
    "Metrics",
    "Need",
    "Part",
    "Plan",
    "Preference",
    "RewardScore",
    "Score",
    "Shard",
    "SourceCounts",
    "SplitCounts",
    "Step",
    "StoredFile",
    "TaskScore",
    "TrainingResult",
    "Wins",
    "comparison",
    "contents",
    "environment",
    "plan",
    "training",
]
