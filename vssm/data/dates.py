"""The dates of a series: their usual step, and gaps in them.

pandas knows the calendar: months, quarters, years and business days. Legend: times (N,) datetime64,
ascending.
"""

from typing import Any

import numpy as np

__all__ = ["uneven_dates", "usual_step"]

_GAP = 1.5  # steps; two dates that are further apart have a gap between them


def uneven_dates(times: np.ndarray) -> str | None:
    """Says where the first gap or extra date is; None if all dates are one usual step apart.

    Example:
        >>> print(uneven_dates(np.array(["2024-05-01", "2024-05-02", "2024-05-05"], "M8[s]")))
        dates are uneven: 2024-05-05T00:00:00 comes right after 2024-05-02T00:00:00
    """
    import pandas

    if len(times) < 2:
        return None
    first, step = pandas.Timestamp(times[0]), usual_step(times)
    dates = pandas.date_range(first, periods=len(times) + 1, freq=step, unit="us")
    dates = dates[dates > first]  # `first` itself may lie off the calendar
    odd = times[1:] != dates[: len(times) - 1].to_numpy()
    if not odd.any():
        return None
    last, date = times[odd.argmax() :][:2].astype("datetime64[s]")
    return f"dates are uneven: {date} comes right after {last}"


def usual_step(times: np.ndarray) -> Any:  # noqa: ANN401
    """Returns the step of the longest run of dates without a gap, as an offset of pandas."""
    import pandas
    from pandas.tseries.frequencies import to_offset
    from pandas.tseries.offsets import BusinessDay

    times = times.astype("datetime64[us]")
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
