"""One file for each JSON that stages hand on: plan, dataset, training, metrics, export, contents,
comparison."""

from flytune.records import environment
from flytune.records.attempt import Attempt, NodeAttempt
from flytune.records.comparison import Comparison
from flytune.records.contents import Contents, StoredFile
from flytune.records.dataset import Bin, Manifest, Shard, SourceCounts, SplitCounts
from flytune.records.export import Export
from flytune.records.figures import Figure, Interval, MeasuredFigure, SampleScores
from flytune.records.metrics import Answer, Metrics, Part, Score, TaskScore, Wins
from flytune.records.plan import Calibration, Interruptions, Loading, Need, Plan
from flytune.records.training import GpuUse, Step, TrainingResult

__all__ = [
    "Answer",
    "Attempt",
    "Bin",
    "Calibration",
    "Comparison",
    "Contents",
    "Export",
    "Figure",
    "GpuUse",
    "Interruptions",
    "Interval",
    "Loading",
    "Manifest",
    "MeasuredFigure",
    "Metrics",
    "Need",
    "NodeAttempt",
    "Part",
    "Plan",
    "SampleScores",
    "Score",
    "Shard",
    "SourceCounts",
    "SplitCounts",
    "Step",
    "StoredFile",
    "TaskScore",
    "TrainingResult",
    "Wins",
    "environment",
]
