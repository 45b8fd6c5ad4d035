"""Sweep over variants of one recipe: a complete fine-tune for each point, then a table, a chart and the best
recipe.

flyte run --local flyte2/sweep.py sweep --recipe recipes/demo-qlora.yaml --grid '{"training.learning_rate":
[5e-4, 1e-3, 2e-3]}'

Points that share prepared data or a base model wait for it together; after that each goes on by itself, so
that one trains while another is evaluated. A failed point fails alone.
"""

import asyncio
from typing import Any

from flyte.io import Dir, File

from flyte2 import wiring
from flyte2.driver import workflow
from flyte2.stages import call
from flytune.console import step_lines
from flytune.stages import points
from flytune.stages.planned import Run, Running, first_values
from flytune.stages.table import COMPARE_POINTS, DRAW, RUN, STORE, Stage

_SHARED, *_OWN = RUN


@workflow
async def sweep(recipe: Any, grid: Any, changes: Any, max_points: Any, **bounds: Any) -> Any:
    asked = {"recipe": recipe, "grid": grid, "changes": changes, "max_points": max_points}
    drawn, running = await call(DRAW)(**bounds, **asked)
    results = await _Sweep(running).run()
    going = running.after(
        {
            name: str(result) if isinstance(result, BaseException) else _kept(result)
            for name, result in results.items()
        }
    )
    artifacts = [results[run.recipe.name][STORE.makes] for run in going.runs]
    return await call(COMPARE_POINTS)(points=drawn, running=going, artifact=[artifacts] if artifacts else [])


def _kept(values: dict[str, Any]) -> dict[str, Any]:
    """Return what the stages of a point have made as its state has it: addresses, and contents of records."""
    stages = [stage for phase in RUN for stage in phase.stages if stage is not STORE]
    return {stage.makes: points.kept(values[stage.makes], (Dir, File)) for stage in stages}


class _Sweep:
    """Points that run beside each other."""

    def __init__(self, running: Running) -> None:
        self._running, self._failed = running, 0
        self._turn = asyncio.Semaphore(running.concurrency or max(1, len(running.runs)))
        self._shared: dict[tuple[str, str, str], asyncio.Task[Any]] = {}

    async def run(self) -> dict[str, Any]:
        """Return each point's values, or its error, by the recipe's name."""
        self._share()
        runs = self._running.runs
        results = await asyncio.gather(*(self._point(run) for run in runs), return_exceptions=True)
        return {run.recipe.name: result for run, result in zip(runs, results, strict=True)}

    def _share(self) -> None:
        """Start the stages that points share, once for equal inputs."""
        for stage in _SHARED.stages:
            for group, elements in points.elements(stage, self._running.runs).items():
                for element in elements:
                    task = asyncio.ensure_future(_element(stage, group, element.inputs))
                    self._shared |= {(stage.makes, group, name): task for name in element.runs}

    async def _point(self, run: Run) -> dict[str, Any]:
        try:
            values = run.made | first_values(run, Dir(path=run.made["harness_data"]))
            for stage in _SHARED.stages:
                group = run.value(stage.on) if stage.on else points.ALL
                values[stage.makes] = await self._shared[stage.makes, group, run.recipe.name]
            async with self._turn:
                points.refuse(self._failed, self._running.spare)
                step_lines.show(self._running.titles([run])[0])
                for phase in _OWN:
                    values = await wiring.run_phase(phase, values)
            return values
        except Exception:
            self._failed += 1
            raise


async def _element(stage: Stage, group: str, inputs: dict[str, Any]) -> Any:
    return await call(stage, group if stage.on else "")(**inputs)
