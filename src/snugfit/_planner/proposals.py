"""What strategies propose, and the measurements behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

from snugfit._core.plan import Candidate
from snugfit._core.profile import Profile
from snugfit._training.strategy import Strategy

if TYPE_CHECKING:
    from snugfit.profiling import Probe, TensorProbe

Probes = Sequence["Probe | TensorProbe"]
"""The probes of a strategy."""
Prober = tuple[Strategy, Probes]
"""A strategy with its probes."""


@dataclass(frozen=True)
class Proposal:
    """What a strategy proposes that was measured in a process of its own.

    Attributes:
        candidates: its candidates, for a process that has measured nothing.
        profile: that of such a process.
        next_profile: the same if it finds these measurements in the cache.
        found, made: names of cached measurements that were used, and of new ones.
    """

    candidates: tuple[Candidate, ...]
    profile: Profile
    next_profile: Profile
    found: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposals:
    """Candidates, the strategies that support the model with their probes, and the profile.

    Attributes:
        together: candidates of strategies that were measured in this process.
        elsewhere: the same for a process in which nothing was measured; none without a budget.
        refused: candidates of strategies that do not support the model.
        able: strategies that were measured in this process.
        profile: all measurements that were made in this process.
        apart: what was proposed by strategies that were measured in a process of their own, by name.
    """

    together: list[Candidate] = field(default_factory=list)
    elsewhere: list[Candidate] = field(default_factory=list)
    refused: list[Candidate] = field(default_factory=list)
    able: list[Prober] = field(default_factory=list)
    profile: Profile = field(default_factory=lambda: Profile(()))
    apart: Mapping[str, Proposal] = field(default_factory=dict)

    @property
    def here(self) -> list[Candidate]:
        """All candidates for this process."""
        return [*self.together, *self._apart]

    @property
    def fresh(self) -> list[Candidate]:
        """All candidates for a process in which nothing was measured."""
        return [*self.elsewhere, *self._apart]

    @property
    def everywhere(self) -> list[Candidate]:
        """All candidates, in either process."""
        return [*self.together, *self.fresh]

    @property
    def _apart(self) -> list[Candidate]:
        return [candidate for each in self.apart.values() for candidate in each.candidates]

    @property
    def measured(self) -> Profile:
        """All measurements."""
        return reduce(merged, [each.profile for each in self.apart.values()], self.profile)

    def with_others(self, own: Profile) -> Profile:
        """A strategy's own profile, with the lines of the others, too."""
        every = self.measured
        return replace(
            own,
            lines={**every.lines, **own.lines},
            floors={**every.floors, **own.floors},
            kept={**every.kept, **own.kept},
            tensors=every.tensors,
        )

    def probes_of(self, choice: Candidate | None) -> Probes | None:
        """The probes of a choice's strategy; None without a choice, or if its strategy refuses the model."""
        return next((probes for each, probes in self.able if choice and each.name == choice.strategy), None)


def merged(known: Profile, more: Profile) -> Profile:
    """Merge two profiles of one process."""
    expected = {**known.expected, **more.expected}
    resting = max(known.base_bytes - sum(known.expected.values()), more.base_bytes - sum(more.expected.values()))
    return replace(
        more,
        lines={**known.lines, **more.lines},
        floors={**known.floors, **more.floors},
        kept={**known.kept, **more.kept},
        base_bytes=resting + sum(expected.values()),
        start_bytes=known.start_bytes if known.floors else more.start_bytes,
        left={**known.left, **more.left},
        expected=expected,
        seconds=known.seconds + more.seconds,
        delay_seconds=known.delay_seconds + more.delay_seconds,
        tensors=more.tensors or known.tensors,
    )
