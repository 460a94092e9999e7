"""The dates of a series: their usual step, and gaps in them.

pandas knows the calendar: months, quarters, years and business days. Legend: times (N,) datetime64,
ascending.
"""

from typing import Any

import numpy as np

__all__ = ["plain_dates", "uneven_dates", "usual_step"]

_GAP = 1.5  # steps; two dates that are further apart have a gap between them


def plain_dates(times: np.ndarray) -> np.ndarray:
    """Returns dates in seconds, or in microseconds if one of them lies between two seconds.

    Example:
        >>> plain_dates(np.array(["2024-05-01T12", "2024-05-01T13"], "M8[h]")).dtype
        dtype('<M8[s]')
        >>> plain_dates(np.array(["2024-05-01T12:00:00.1"], "M8[ns]"))
        array(['2024-05-01T12:00:00.100000'], dtype='datetime64[us]')
    """
    seconds = times.astype("datetime64[s]")
    whole = np.isnat(times) | (seconds == times)
    return seconds if whole.all() else times.astype("datetime64[us]")


def uneven_dates(times: np.ndarray) -> str | None:
    """Says where the first gap or extra date is; None if all dates are one usual step apart.

    Example:
        >>> print(uneven_dates(np.array(["2024-05-01", "2024-05-02", "2024-05-05"], "M8[s]")))
        dates are uneven: 2024-05-05T00:00:00 comes right after 2024-05-02T00:00:00
    """
    if len(times) < 2:
        return None
    times = plain_dates(times)
    odd = times[1:] != _dates_from(times[0], usual_step(times), len(times) - 1)
    if not odd.any():
        return None
    first = int(odd.argmax())
    return f"dates are uneven: {times[first + 1]} comes right after {times[first]}"


def _dates_from(first: np.datetime64, step: Any, num: int) -> np.ndarray:  # noqa: ANN401
    """Returns the `num` dates after `first`."""
    import pandas

    unit = np.datetime_data(first.dtype)[0]
    dates = pandas.date_range(pandas.Timestamp(first), periods=num + 2, freq=step, unit=unit)
    dates = dates[dates > pandas.Timestamp(first)]  # `first` itself may lie off the calendar
    return dates[:num].to_numpy()


def usual_step(times: np.ndarray) -> Any:  # noqa: ANN401
    """Returns the step of the longest run of dates without a gap."""
    import pandas
    from pandas.tseries.frequencies import to_offset
    from pandas.tseries.offsets import BusinessDay

    steps = np.diff(times)
    ends = np.flatnonzero(steps > _GAP * np.median(steps)) + 1
    run: Any = pandas.DatetimeIndex(max(np.split(times, ends), key=len))
    step: Any = to_offset(pandas.infer_freq(run)) if len(run) > 2 else None
    months = np.diff(run.year * 12 + run.month)
    if step is None and len(set(run.day)) == 1 and len(set(months)) == 1 and months[0]:
        step = pandas.DateOffset(months=int(months[0]))  # the 15th of each month, say
    if step is None:
        values, counts = np.unique(steps, return_counts=True)
        step = to_offset(values[counts.argmax()].item())
    weekdays = np.is_busday(times.astype("datetime64[D]")).all()
    return BusinessDay() if step == to_offset("D") and weekdays and len(times) > 5 else step
