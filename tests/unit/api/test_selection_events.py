"""What subscribers are told of a run that selects tensors is what its record keeps."""

import snugfit
from snugfit._training.events import RunDone, TensorsSelected


def test_the_end_of_a_run_tells_its_intervals(tmp_path):
    seen = []
    plan = snugfit.plan(
        "smallconv", "digits", strategy="elastic", scheme="head", epochs=2, max_train=32, max_val=8, image_size=8,
        batch_size=8, threads=1,
    )  # fmt: skip
    assert "scheme head" in str(plan)
    record = plan.run([seen.append], out=tmp_path / "run")
    selected, done = (next(each for each in seen if isinstance(each, kind)) for kind in (TensorsSelected, RunDone))
    (interval,) = record.intervals
    assert done.record.intervals == record.intervals and done.record.tensors == record.tensors
    assert selected.interval.tensors == interval.tensors and selected.count == len(record.tensors)
    assert interval.epochs == 2 and 0 < len(interval.tensors) < len(record.tensors)
