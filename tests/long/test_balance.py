"""``kvpatch balance`` and two served engines: one gets what the other one does not need."""

import os
import subprocess
from contextlib import ExitStack

from harness.engines.balance_alone import command_for
from harness.engines.runs import Run
from harness.engines.serving import answers, eventually, watched
from kvpatch import control

COUNT = 6
RUN = Run(blocks=300)


def test_memory_goes_where_it_is_needed_and_nothing_is_lost(device, tmp_path):
    names = [f"balance-{os.getpid()}-{number}" for number in range(2)]
    with ExitStack() as stack:
        servers = []
        for name in names:
            run = RUN.within({"KVCACHED_IPC_NAME": name, "KVCACHED_MAX_CACHED_TOKENS": "-1"})
            servers.append(stack.enter_context(watched(run, device, tmp_path / name)))
        first = [answers(one, COUNT) for one in servers]
        page = control.find(names[0]).demand()["page"]
        most = control.find(names[0]).said["most"]
        least = control.find(names[0]).demand()["least"]
        # As if the device had room for one request of each: of a fifth of it the second one lends.
        size = 2 * least + 4 * page
        command = stack.enter_context(command_for(names))
        for kill in (True, False):
            for name in names:
                control.find(name).limit(most)
            balance = subprocess.Popen(
                [*command, f"--memory={size}", f"--priority={names[0]}=4"],
                stdout=subprocess.PIPE,
                text=True,
            )

            def limits() -> list[int]:
                return [control.find(name).said["limit"] for name in names]

            assert balance.stdout is not None
            appeared = balance.stdout.readline()  # from here on it ends by a signal as it should
            assert eventually(lambda: sum(limits()) <= size + page, 60)
            assert eventually(
                lambda: sum(control.find(name).said["mapped"] for name in names) <= size + page, 60
            )
            assert eventually(lambda: min(limits()) < least, 60)
            if kill:
                # It says a move when the engine has answered, which is after its limit is seen.
                line = appeared
                while line and " -> " not in line:
                    line = balance.stdout.readline()
                assert " -> " in line
                balance.kill()
            else:
                balance.terminate()
            balance.communicate(timeout=60)
            assert (balance.returncode == 0) is not kill
            # What an idle engine had lent comes back, also by itself.
            assert eventually(lambda: min(limits()) >= least and sum(limits()) <= size + page, 60)
        for name in names:
            said = control.find(name).limit(control.find(name).said["limit"]).said
            assert said["evicted_without_copy"] == 0
        assert [answers(one, COUNT) for one in servers] == first
        for name in names:
            assert control.find(name).limit(most).limit == most
