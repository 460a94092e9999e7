"""How fast things are, beside peers that are installed.

| benchmark | what is timed                                        | where it is described |
| --------- | ---------------------------------------------------- | --------------------- |
| scan      | the selective scan, forward and backward             | `bench.scan`          |
| train     | tokens per second of `vssm.training.loop`            | `bench.train`         |
| generate  | generation in one shot, prompted and in chunks       | `bench.generate`      |
| forecast  | sample paths of series, against the horizon          | `bench.forecast`      |
| table1    | the paper's Table 1: time against length, all models | `bench.table1`        |

All report medians after a warm-up, record backend, versions, device and commit, note what could
not run, and continue from their own file when they were stopped.
"""

from vssm.lab.bench.forecast import main_forecast as main_forecast
from vssm.lab.bench.generate import main_generate as main_generate
from vssm.lab.bench.scan import Shape as Shape
from vssm.lab.bench.scan import main_scan as main_scan
from vssm.lab.bench.table1 import main_table1 as main_table1
from vssm.lab.bench.train import main_train as main_train
