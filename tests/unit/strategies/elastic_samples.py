"""Made-up profiles of plain networks: convolutions with biases, a pass-through layer after each, and a classifier."""

from strategy_samples import MB, facts, line

from snugfit._core.profile import OperatorStats, Profile, Saved, StepSeconds, TensorProfile, TensorStats
from snugfit.strategies.elastic.probes import FULL, HEAD, IMPORTANCE

BATCH = 8
MAP = 50_000


def tensor(name, parameters=1000, seconds=1e-3, update=1e-5, saved=()):
    return TensorStats(name, parameters, 4 * parameters, seconds, update, 10, tuple(saved))


def operator(index, kind, name, tensors=(), seconds=(1e-3, 1e-3), bytes_kept=0, output_bytes=MAP):
    forward, passing = seconds
    saved = (Saved(100 + index, bytes_kept),) if bytes_kept else ()
    return OperatorStats(name, kind, (index - 1,), index + 1, output_bytes, forward, passing, 10, saved, tuple(tensors))


def layers(convolutions=3, parameters=1000, seconds=1e-3, map_bytes=MAP):
    """Operators: conv with weight and bias, and relu, some times; then a linear layer."""
    found = []
    for number in range(convolutions):
        index = len(found)
        name, entry = f"conv{number}", Saved(index, map_bytes)
        pair = [tensor(f"{name}.weight", parameters, seconds, saved=[entry]), tensor(f"{name}.bias", 10, seconds / 10)]
        found.append(operator(index, "Conv2d", name, pair, (seconds, seconds), output_bytes=map_bytes))
        found.append(
            operator(index + 1, "ReLU", f"relu{number}", (), (seconds / 5, seconds / 5), map_bytes // 32, map_bytes)
        )
    pair = [tensor("head.weight", 100, seconds / 10, saved=[Saved(len(found), 40)]), tensor("head.bias", 10, 1e-5)]
    found.append(operator(len(found), "Linear", "head", pair, (seconds / 10, seconds / 10), output_bytes=40))
    return tuple(found)


def tensor_profile(steps=None, batch=BATCH, **changes):
    return TensorProfile(batch, layers(**changes), steps)


def whole_steps(head=5e-3, full=12e-3, stock=14e-3, batch=BATCH):
    return StepSeconds(batch, stock, full, head)


def elastic_profile(tensors=None, base=0, fixed=10 * MB, sample=MB, without=(), **floors):
    """Measured lines somewhat above what the operators add up to."""
    lines = {HEAD: line(fixed, sample // 10), FULL: line(2 * fixed, sample), IMPORTANCE: line(fixed, sample)}
    lines = {name: value for name, value in lines.items() if name not in without}
    least = {HEAD: 5 * MB, FULL: 15 * MB, IMPORTANCE: 7 * MB} | floors
    tensors = tensor_profile(whole_steps()) if tensors is None else tensors
    return Profile((facts("a", weights=1 * MB), facts("b")), lines, least, {}, base, tensors=tensors)
