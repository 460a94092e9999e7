"""A table with gaps as the windows of training, and samples of the windows as tables again."""

from pathlib import Path

import numpy as np
import torch

from vssm.data.meta import Meta
from vssm.data.scale import centre_of_steps, window_scale_of_known
from vssm.data.series import phases
from vssm.data.table import Table, find_column

__all__ = ["TableWindows"]


class TableWindows:
    """Cuts a table into the windows of training, as the model reads them, and puts them together.

    Windows follow each other; the last one ends with the table and may overlap the one before.

    Arguments:
        table: The table; it may have gaps.
        meta: The data that the model was trained on.
        given: How many features of a step, the last ones, are always known.
        path: The file of the table, for messages.
    """

    x: torch.Tensor
    known: torch.Tensor

    def __init__(self, table: Table, meta: Meta, given: int, path: Path) -> None:
        assert meta.columns is not None and meta.context is not None
        index, given_index = (
            [find_column(table, name, path) for name in names]
            for names in (meta.columns, meta.given_columns)
        )
        values = np.where(np.isfinite(table.values), table.values, np.nan)
        self.values: np.ndarray = values[:, index]
        """The columns of training, (N, D); NaN in gaps."""
        self._rows, self._meta = meta.length * meta.patch, meta
        num = len(values)
        if num < self._rows:
            raise ValueError(f"{path} has {num} rows; needed: {self._rows}, a window of training")
        self._starts = [*range(0, num - self._rows, self._rows), num - self._rows]
        cut = np.array(self._starts)[:, None] + np.arange(self._rows)

        self._mean, self._std = np.array(meta.mean or 0.0), np.array(meta.std or 1.0)
        x = torch.from_numpy(((self.values - self._mean) / self._std)[cut])  # (windows, rows, D)
        if meta.separate:
            x = x.transpose(1, 2).flatten(0, 1)[..., None]
        self._centre = torch.zeros(len(x), 1, x.shape[2], dtype=x.dtype)
        self._deviation = torch.ones_like(self._centre)
        if meta.windowed is not None:
            centre, self._deviation = window_scale_of_known(
                x[:, : meta.context], meta.windowed, meta.season
            )
            self._centre = centre_of_steps(centre, -meta.context, self._rows)
        self._channels = x.shape[2]
        beside = values[:, given_index]
        if meta.given_mean is not None:
            beside = (beside - np.array(meta.given_mean)) / np.array(meta.given_std)
        if meta.cycles:
            if table.times is None:
                raise ValueError(f"{path} has no column of dates, which this run was trained with")
            beside = np.concatenate([beside, phases(table.times, meta.cycles)], 1)
        beside = torch.from_numpy(beside[cut]).repeat_interleave(len(x) // len(cut), 0)
        x = torch.cat([(x - self._centre) / self._deviation, beside], -1)
        # Features that are given stay last in a step of several rows.
        self._made = x.shape[2] - given // meta.patch
        parts = (x[..., : self._made], x[..., self._made :])
        parts = [part.unflatten(1, (-1, meta.patch)).flatten(2) for part in parts]
        x = torch.cat(parts, -1).float()
        self.x, self.known = x.nan_to_num(), ~x.isnan()
        """Windows (B, T, features), and which of their entries are known."""

    def place(self, made: np.ndarray) -> np.ndarray:
        """Returns samples (windows, num, T, features) as tables (num, N, D) in the table's units.

        Known cells are those of the table.
        """
        x = torch.from_numpy(made).double()[..., : self._meta.patch * self._made]
        x = x.unflatten(-1, (self._meta.patch, self._made)).flatten(2, 3)[..., : self._channels]
        x = x * self._deviation[:, None] + self._centre[:, None]
        if self._meta.separate:
            x = x[..., 0].unflatten(0, (len(self._starts), -1)).permute(0, 2, 3, 1)
        tables = np.broadcast_to(self.values, (x.shape[1], *self.values.shape)).copy()
        for window, start in zip(x.numpy()[::-1], self._starts[::-1], strict=True):
            tables[:, start : start + self._rows] = window * self._std + self._mean
        return np.where(np.isnan(self.values), tables, self.values)
