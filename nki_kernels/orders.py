"""Has the orders in which the kernels issue their stages: orders.json, which `tools/schedule.py`
writes.

`nki_kernels.schedule` says what an entry means. MADE has the estimates of each order in
microseconds, on Trn1 for each of the sizes that its search has.
"""

import json
from pathlib import Path

from delta_trn.nki_kernels.schedule import read_order

FILE = Path(__file__).with_name("orders.json")
_FOUND = json.loads(FILE.read_text())
ORDERS = {name: read_order("; ".join(found["order"])) for name, found in _FOUND.items()}
MADE = {name: tuple(found["made"]) for name, found in _FOUND.items()}
