"""Profiles made by hand."""

from hypothesis import strategies as st

from snugfit._core.profile import OperatorStats, Saved, StepSeconds, TensorProfile, TensorStats


def tensor(name, seconds=0.0, update=0.0, *, size=4, macs=0, saved=()):
    return TensorStats(name, size // 4, size, seconds, update, macs, tuple(Saved(*one) for one in saved))


def operator(name, inputs, pass_seconds, *tensors, forward=1.0, macs=0, saved=(), size=8, **more):
    """An operator whose map has its own number, one more than its source's in a straight network."""
    more.setdefault("map", 100 + int("".join(c for c in name if c.isdigit()) or 0))
    return OperatorStats(
        name=name, kind=more.pop("kind", "Layer"), inputs=tuple(inputs), output_bytes=size, forward_seconds=forward,
        pass_seconds=pass_seconds, macs=macs, saved=tuple(Saved(*one) for one in saved), tensors=tensors, **more,
    )  # fmt: skip


def straight(*layers, batch=1, steps=None):
    """Operators one after the other; each layer is its pass time and (gradient, update) times of its tensors."""
    operators = [
        operator(f"op{i}", (i - 1,), passing, *(tensor(f"{i}.{j}", *times) for j, times in enumerate(tensors)))
        for i, (passing, tensors) in enumerate(layers)
    ]
    return TensorProfile(batch, tuple(operators), steps, input_bytes=8)


TIMES = st.one_of(st.integers(0, 5).map(float), st.floats(1e-3, 5, allow_subnormal=False))


@st.composite
def layers(draw, least=1, most=6):
    """Layers of :func:`straight`, the last of which has tensors."""
    found = draw(
        st.lists(
            st.tuples(TIMES, st.lists(st.tuples(TIMES, TIMES), max_size=2)),
            min_size=least - 1, max_size=most - 1,
        )
    )  # fmt: skip
    classifier = (draw(TIMES), draw(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=2)))
    return [*found, classifier]


@st.composite
def branched(draw, most=7):
    """A network in which every operator reads one or two of those before it."""
    count = draw(st.integers(2, most))
    operators = []
    for i in range(count):
        inputs = {i - 1} if i < 2 else {i - 1, *draw(st.sets(st.integers(-1, i - 2), max_size=1))}
        if i < count - 1 and draw(st.booleans()):
            inputs = {draw(st.integers(-1, i - 1))}
        own = draw(st.lists(st.tuples(TIMES, TIMES), min_size=int(i == count - 1), max_size=2))
        parts = [tensor(f"{i}.{j}", *times, size=draw(st.sampled_from([4, 40, 400]))) for j, times in enumerate(own)]
        parts = [
            tensor(part.name, part.seconds, part.update_seconds, size=part.bytes, saved=[(max(inputs) + 101, 8)])
            for part in parts
        ]
        saved = [(1000 + i, draw(st.integers(0, 40)))]
        operators.append(
            operator(f"op{i}", sorted(inputs), draw(TIMES), *parts, saved=saved, size=draw(st.integers(1, 60)))
        )
    return TensorProfile(1, tuple(operators), input_bytes=8)


def with_steps(profile, stock, full, head, batch=1):
    return TensorProfile(
        profile.batch, profile.operators, StepSeconds(batch, stock, full, head), input_bytes=profile.input_bytes
    )
