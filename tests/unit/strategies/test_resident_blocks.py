"""Blockwise training with all units in memory."""

import snugfit
from snugfit._training.run import Run
from snugfit.strategies.blockwise.controller import Controller


def test_units_are_freed_before_the_last_block_ends(monkeypatch, tmp_path):
    """What is in memory when a phase ends counts to the next: here to the test of the exit, which does not need it."""
    controllers, resident = [], []
    begin, end_phase = Controller.__init__, Run.end_phase

    def made(self, *args):
        controllers.append(self)
        begin(self, *args)

    def ended(self, *args):
        resident.append(len(controllers[-1].residents))
        end_phase(self, *args)

    monkeypatch.setattr(Controller, "__init__", made)
    monkeypatch.setattr(Run, "end_phase", ended)
    planned = snugfit.plan(
        *("smallconv", "digits"), strategy="blockwise", residency="all", block_units=1, local_loss="lls-mxm",
        max_train=16, max_val=16, batch_size=8, epochs=1, threads=1, profile_cache="off",
    )  # fmt: skip
    record = planned.run(out=tmp_path / "run")
    blocks = len(record.phases) - 1
    assert blocks > 1
    assert resident == [*[blocks] * (blocks - 1), 0, 0]
