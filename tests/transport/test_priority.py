import os
import subprocess
import sys

import pytest

CODE = """
import os
from qiao.transport.priority import run_at_once, run_when_idle
seen = [os.sched_getscheduler(0)]
for change in (run_when_idle, run_at_once):
    change()
    seen.append(os.sched_getscheduler(0))
print(*seen)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_the_front_end_gives_way_and_the_engine_does_not():
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(os.SCHED_OTHER), str(os.SCHED_BATCH), str(os.SCHED_OTHER)]
