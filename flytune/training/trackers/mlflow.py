"""MLflow."""

from pathlib import Path
from types import ModuleType

from flytune.training.trackers.base import Tracker


class Mlflow(Tracker):
    """A server; an experiment for each project."""

    name = "mlflow"
    requirement = "flytune[mlflow]"

    def variables(self, project: str, checkpoints: Path) -> dict[str, str]:
        return {"MLFLOW_EXPERIMENT_NAME": project}

    def access_problem(self, project: str) -> str | None:
        """Return why it cannot be reported to; make the project's experiment if it can."""
        import mlflow

        try:
            mlflow.set_experiment(project)
        except mlflow.MlflowException as error:
            return f"{' '.join(str(error).split())[:300]}; set MLFLOW_TRACKING_URI to a server that answers"
        return None

    def run_id(self, library: ModuleType) -> str | None:
        run = library.active_run()
        return run and str(run.info.run_id)

    def resume_variables(self, run_id: str) -> dict[str, str]:
        return {"MLFLOW_RUN_ID": run_id}


TRACKER = Mlflow()
