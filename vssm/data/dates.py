"""The usual step of dates: months of a calendar, or a number of seconds or microseconds.

Legend: times (N,) datetime64[s] or [us], ascending, N at least 2.
"""

import numpy as np

__all__ = ["calendar_step", "plain_dates", "uneven_dates", "usual_step"]

_MONTH = np.timedelta64(1, "M")


def plain_dates(times: np.ndarray) -> np.ndarray:
    """Returns dates of any unit in seconds, or in microseconds where one lies between two seconds.

    Example:
        >>> plain_dates(np.array(["2024-05-01T12", "2024-05-01T13"], "M8[h]")).dtype
        dtype('<M8[s]')
        >>> plain_dates(np.array(["2024-05-01T12:00:00.1"], "M8[ns]"))
        array(['2024-05-01T12:00:00.100000'], dtype='datetime64[us]')
    """
    seconds = times.astype("datetime64[s]")
    whole = np.isnat(times) | (seconds == times)
    return seconds if whole.all() else times.astype("datetime64[us]")


def calendar_step(times: np.ndarray) -> tuple[int, bool] | None:
    """Returns the usual step in months, and whether dates lie as far from the end of their month.

    None where dates keep no place in their month: then they go by the clock.

    Example:
        >>> calendar_step(np.array(["2023-10-31", "2023-11-30", "2023-12-31"], "M8[s]"))
        (1, True)
    """
    starts = times.astype("datetime64[M]")
    months = _most_frequent(np.diff(starts.astype(np.int64)))
    if not months:
        return None
    into = times - starts.astype("datetime64[s]")
    if (into == into[0]).all() and into[0] < np.timedelta64(28, "D"):  # the first of a month, say
        return months, False
    left = (starts + _MONTH).astype("datetime64[s]") - times
    return (months, True) if (left == left[0]).all() else None  # or the last


def usual_step(times: np.ndarray) -> np.timedelta64:
    """Returns the usual step by the clock, that of business days being a day."""
    steps = np.diff(times)
    return np.timedelta64(_most_frequent(steps.astype(np.int64)), np.datetime_data(steps.dtype)[0])


def _most_frequent(steps: np.ndarray) -> int:
    """Returns the most frequent step, the shortest of several."""
    values, counts = np.unique(steps, return_counts=True)
    return int(values[counts.argmax()])


def uneven_dates(times: np.ndarray) -> str | None:
    """Says which dates are the first that are not one usual step apart; None where all are.

    Example:
        >>> print(uneven_dates(np.array(["2024-05-01", "2024-05-02", "2024-05-03", "2024-05-05"], "M8[s]")))
        dates are uneven: 2024-05-05T00:00:00 comes right after 2024-05-03T00:00:00
    """
    calendar = calendar_step(times)
    if calendar is None:
        odd = np.diff(times) != usual_step(times)
    else:
        odd = np.diff(times.astype("datetime64[M]").astype(np.int64)) != calendar[0]
    if not odd.any():
        return None
    first = int(odd.argmax())
    return f"dates are uneven: {times[first + 1]} comes right after {times[first]}"
