"""How many heaps the C library keeps, in processes of their own, since it is settled once."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

THREADS = """
import ctypes, sys, threading
from qiao.loading.heap import bound_heap
if sys.argv[1] == "bound":
    bound_heap()
ready, end = threading.Barrier(9), threading.Barrier(9)
def work():
    held = [bytes(100_000) for _ in range(10)]
    ready.wait()
    end.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for one in threads:
    one.start()
ready.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = libc.fopen(sys.argv[2].encode(), b"w")
assert libc.malloc_info(0, ctypes.c_void_p(file)) == 0
libc.fclose(ctypes.c_void_p(file))
end.wait()
"""


def heaps(kind: str, path: str) -> int:
    subprocess.run([sys.executable, "-c", THREADS, kind, path], check=True, timeout=60)
    with open(path) as file:
        return file.read().count("<heap nr=")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not the GNU C library")
def test_threads_share_two_heaps(tmp_path: object) -> None:
    assert heaps("bound", f"{tmp_path}/bound.xml") <= 2
    assert heaps("as it is", f"{tmp_path}/free.xml") > 2
