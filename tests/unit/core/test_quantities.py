"""Bytes and seconds: parsed and printed, there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit._core.amounts import parse_bytes, parse_seconds
from snugfit._quantities import format_bytes, format_seconds, format_short_seconds
from snugfit.errors import UsageError

POWERS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("100MB", 100_000_000), ("100MiB", 104_857_600), ("512MiB", 536_870_912), ("1.5 GB", 1_500_000_000),
        (" 2gib ", 2_147_483_648), ("7b", 7), ("0.5kB", 500), ("1tib", 1_099_511_627_776), (12, 12),
        (100e6, 100_000_000),
    ],
)  # fmt: skip
def test_sizes_by_hand(text, count):
    assert parse_bytes(text) == count and isinstance(parse_bytes(text), int)


@given(st.integers(1, 10**6), st.sampled_from(sorted(POWERS)), st.sampled_from(["", " "]), st.booleans())
def test_every_unit_scales(number, unit, space, lower):
    assert parse_bytes(f"{number}{space}{unit.lower() if lower else unit}") == number * POWERS[unit]


@given(st.integers(1, 10**13))
def test_a_count_survives_as_text(count):
    assert parse_bytes(f"{count}B") == parse_bytes(count) == count


@pytest.mark.parametrize("text", ["7", "100", "1.5", " 512 "])
def test_a_size_without_a_unit_is_refused_with_what_was_meant(text):
    with pytest.raises(
        UsageError, match=rf"'{text}' has no unit; did you mean {text.strip()}MB or {text.strip()}MiB\?"
    ):
        parse_bytes(text)


@given(st.integers(1, 9 * 10**11))
def test_printed_sizes_parse_back_to_what_the_digits_say(count):
    text = format_bytes(count)
    number, unit = text.split()
    assert 1 <= float(number) < 1000
    assert abs(parse_bytes(text) - count) <= (0 if unit == "B" else 0.05 * POWERS[unit])


@pytest.mark.parametrize(
    "text", ["", "MB", "100 XB", "-5MB", "1e6", "5 MB please", "1,5GB", "nan", "0", "0MB", "9" * 400 + "TB", 0, -1]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError) as error:
        parse_bytes(text)
    assert str(text)[:70] in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2.0, 2.0**63, 10**400, 0.4, True, False, None, [1]])
def test_numbers_that_are_no_size_are_refused(value):
    with pytest.raises(UsageError):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (97_300_000, "97.3 MB"), (999, "999 B"), (1000, "1.0 kB"), (0, "0 B"), (999_949, "999.9 kB"),
        (999_951, "1.0 MB"), (999_999_999, "1.0 GB"), (2_500_000_000_000, "2500.0 GB"), (-5_000_000, "-5.0 MB"),
    ],
)  # fmt: skip
def test_sizes_print_in_decimal_units(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("15m", 900), ("15min", 900), ("1h30m", 5400), ("1h 30m", 5400), ("2d", 172_800),
        ("250ms", 0.25), (5, 5),
    ],
)  # fmt: skip
def test_durations_by_hand(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@given(st.integers(0, 99), st.integers(0, 59), st.integers(1, 59))
def test_parts_of_a_duration_add_up(hours, minutes, seconds):
    assert parse_seconds(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


NO_DURATIONS = ["", "soon", "5 parsecs", "1h x", "-3s", "0s", "1.5.5h", 0, -1.0, float("nan"), float("inf")]


@pytest.mark.parametrize("text", NO_DURATIONS)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UsageError):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "250ms"), (0.9996, "1.0s"), (1, "1.0s"), (59.94, "59.9s"), (59.97, "1m00s"), (75, "1m15s"),
        (3599.7, "1h00m"), (5400, "1h30m"), (90_000, "25h00m"),
    ],
)  # fmt: skip
def test_durations_print(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0us"), (4.2e-6, "4us"), (1.234e-3, "1.23ms"), (0.25, "250ms"), (75, "1m15s")]
)
def test_short_durations_print(seconds, text):
    assert format_short_seconds(seconds) == text


@given(st.floats(0.001, 1e6))
def test_printed_durations_parse_back_to_what_the_digits_say(seconds):
    again = parse_seconds(format_seconds(seconds))
    precision = 0.0005 if seconds < 0.9 else 0.05 if seconds < 59 else 0.5 if seconds < 3599 else 30
    assert abs(again - seconds) <= precision * 1.01 + 1e-9
