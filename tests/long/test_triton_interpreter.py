"""Triton on the host device's Runner V2."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("asked", [True, False])
def test_triton_has_a_cpu_backend_only_where_the_interpreter_is_asked_for(asked):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if asked:
        environment["TRITON_INTERPRET"] = "1"
    code = "import sys, triton.backends as b; print('cpu' in b.backends, 'kvpatch' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert said.split() == [str(asked), "False"]
