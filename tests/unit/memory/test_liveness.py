"""The liveness of a step against an oracle whose tensors are Python objects, which reference counting frees."""

import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from snugfit.memory.liveness import OperatorTensors, PassedGradient, StepMemory


class Buffer:
    """Memory of a tensor."""


class Oracle:
    """Runs a step with real objects.

    Attributes:
        live: bytes of the buffers that are referenced.
        peak: the most of them.
    """

    def __init__(self, operators, sizes):
        self.live = self.peak = 0
        self.operators, self.saved = operators, []
        self.maps = {number: self.buffer(size) for number, size in sizes.items()}
        self.caller = list(self.maps.values())
        self.known = weakref.WeakValueDictionary(self.maps)

    def buffer(self, size):
        self._add(size)
        found = Buffer()
        weakref.finalize(found, self._add, -size)
        return found

    def _add(self, size):
        self.live += size

    def look(self, more=0):
        self.peak = max(self.peak, self.live + more)

    def forward(self):
        for index, operator in enumerate(self.operators):
            for number, size in operator.made.items():
                self.known[number] = self.maps[number] = self.buffer(size)
            self.saved.append([self.keep(number, size) for number, size in operator.kept.items()])
            self.look(operator.forward_scratch)
            later = {each for other in self.operators[index + 1 :] for each in (*other.reads, *other.gives)}
            for number in {*operator.reads, *operator.gives} - later - set(self.operators[-1].gives):
                self.maps.pop(number, None)

    def keep(self, number, size):
        found = self.known.get(number)
        if found is None:
            found = self.known[number] = self.buffer(size)
        return found

    def backward(self, output_bytes):
        last = self.operators[-1]
        self.gradients = {last.number: {None: self.buffer(output_bytes)}} if last.flows else {}
        for operator in reversed(self.operators):
            arrived = list(self.gradients.get(operator.number, {}).values())
            passed = []
            if operator.flows and arrived:
                passed = [(each, arrived[0] if each.in_place else self.buffer(each.bytes)) for each in operator.passed]
                self.look(operator.backward_scratch)
            self.saved.pop()
            self.gradients.pop(operator.number, None)
            del arrived
            while passed:
                self.arrive(*passed.pop(0), [memory for _, memory in passed])

    def arrive(self, each, memory, others):
        slots = self.gradients.setdefault(each.source, {})
        if each.part not in slots:
            slots[each.part] = memory
            return
        used = [one for parts in self.gradients.values() for one in parts.values()] + [memory, *others]
        if sum(one is slots[each.part] for one in used) > 1:
            new = self.buffer(each.bytes)
            self.look()
            slots[each.part] = new


@st.composite
def steps(draw):
    """Operators in a random graph: some work in place, some pass on the gradient that came, some train."""
    size, rarely = st.sampled_from([1, 10, 10, 10, 25]), st.sampled_from([0, 0, 0, 7, 40])
    output_of, bytes_of, flows, operators = {-1: 0}, {-1: draw(size)}, {-1: False}, []
    for number in range(draw(st.integers(1, 8))):
        sources = draw(st.lists(st.integers(-1, number - 1), min_size=1, max_size=3, unique=True))
        reads = tuple(output_of[source] for source in sources)
        over = draw(st.integers(0, 3)) == 0
        output_of[number] = reads[0] if over else number + 1
        bytes_of[number] = bytes_of[sources[0]] if over else draw(size)
        kept = draw(st.lists(st.sampled_from([*reads, output_of[number], 100 + number]), max_size=2))
        passing = [source for source in sources if flows[source]]
        flows[number] = bool(passing) or draw(st.integers(0, 2)) > 0
        passed = []
        for source in passing:
            in_place = bytes_of[source] == bytes_of[number] and draw(st.integers(0, 2)) > 0
            part = number if draw(st.integers(0, 5)) == 0 else None
            passed.append(PassedGradient(source, bytes_of[source], in_place, part))
        operators.append(
            OperatorTensors(
                number=number,
                reads=reads,
                gives=(output_of[number],),
                made={} if over else {output_of[number]: bytes_of[number]},
                kept={each: draw(size) for each in kept} if flows[number] else {},
                forward_scratch=draw(rarely),
                backward_scratch=draw(rarely),
                flows=flows[number],
                passed=tuple(passed),
            )
        )
    return operators, {0: bytes_of[-1]}, bytes_of[len(operators) - 1]


@settings(max_examples=400, deadline=None)
@given(steps())
def test_a_step_takes_what_objects_take(case):
    operators, sizes, output_bytes = case
    step, oracle = StepMemory(operators, sizes), Oracle(operators, sizes)
    step.forward()
    oracle.forward()
    assert (step.live, step.peak) == (oracle.live, oracle.peak)
    step.backward(output_bytes)
    oracle.backward(output_bytes)
    assert (step.live, step.kept, step.peak) == (oracle.live, 0, oracle.peak)


def test_a_shared_gradient_needs_memory_for_a_sum_by_hand():
    """A sum passes one gradient to both terms; the branch then adds its own, while the other is still read."""
    first = OperatorTensors(0, (0,), (1,), {1: 8}, {}, flows=True)
    second = OperatorTensors(1, (1,), (2,), {2: 8}, {}, flows=True, passed=(PassedGradient(0, 8, in_place=True),))
    both = tuple(PassedGradient(source, 8, in_place=True) for source in (0, 1))
    step = StepMemory([first, second, OperatorTensors(2, (1, 2), (3,), {3: 8}, {}, flows=True, passed=both)], {0: 8})
    step.forward()
    assert (step.live, step.peak) == (16, 32), "the input and the output stay"
    step.backward(8)
    assert [each.backward for each in step.found] == [24, 32, 24]
