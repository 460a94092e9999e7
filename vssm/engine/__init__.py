"""The engine: everything that makes repeated generation fast, behind `vssm.Engine`."""

from vssm.engine.engine import Engine as Engine
