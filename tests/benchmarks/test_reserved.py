from benchmarks import estimates, measured_runs, reserved
from flytune.dryrun import DryRun
from training_estimates.memory import GIB


def test_rows_that_can_be_traced_have_a_reserved_figure_and_the_loss_of_transformers():
    runs = [run for run, _ in estimates.estimable(measured_runs.read()[0])[0] if reserved.traceable(run)]
    assert [run.row for run in runs] == ["1", "2", "3", "4", "25", "27", "36", "85", "88", "93", "96"]


def test_what_is_reserved_is_limited_by_the_gpu_and_at_the_least_what_is_needed():
    ((run, closed),) = (
        pair for pair in estimates.estimable(measured_runs.read()[0])[0] if pair[0].row == "1"
    )
    sizes = {
        "phases": {},
        "kinds": {},
        "peak_bytes": 0,
        "peak_phase": "",
        "peak_module": "",
        "largest": [],
        "host_bytes": 0,
    }

    def said(reserved_gib, least_gib):
        dry = DryRun(
            **sizes, reserved_bytes=round(reserved_gib * GIB), least_bytes=round(least_gib * GIB), seconds=1.0
        )
        return round(reserved.reserved(run, closed, dry), 2)

    # One GPU of 79.2 GiB, of which CUDA's context takes 0.55; the driver counted.
    assert (said(60, 50), said(100, 50), said(100, 90)) == (60.55, 79.2, 90.55)
