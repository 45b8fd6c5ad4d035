from benchmarks import estimates, measured_runs, reserved
from training_estimates.memory import GIB


def test_rows_that_can_be_traced_have_a_reserved_figure_and_the_loss_of_transformers():
    runs = [run for run, _ in estimates.estimable(measured_runs.read()[0])[0] if reserved.traceable(run)]
    assert [run.row for run in runs] == ["1", "2", "3", "4", "25", "27", "36", "85", "88", "93", "96"]


def test_what_is_reserved_is_limited_by_the_gpu_and_at_the_least_what_is_needed():
    ((run, closed),) = (
        pair for pair in estimates.estimable(measured_runs.read()[0])[0] if pair[0].row == "1"
    )

    def counted(most_gib, least_gib):
        return round(reserved.reserved(run, closed, most_gib * GIB, least_gib * GIB), 2)

    # One GPU of 79.2 GiB, of which CUDA's context takes 0.55; the driver counted.
    assert (counted(60, 50), counted(100, 50), counted(100, 90)) == (60.55, 79.2, 90.55)
