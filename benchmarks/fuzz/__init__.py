"""Fuzzers for everything that snugfit reads: ``python -m benchmarks.fuzz --minutes 60 [--reader NAME]``.

A trial copies a small tree of good files from ``tests/fuzz/corpus``, damages it by a seed, and reads it in a process of
its own (:mod:`benchmarks.fuzz.trials`). It is good if the reader returns or raises a ``SnugfitError`` of one or two
lines. Another exception, a hang, more memory than the limit, and the end of the process are failures, whose trees are
kept.
"""
