"""The loop of ``kvpatch balance``, with engines that do what an engine does and run nothing."""

import json
import threading
from dataclasses import replace

import pytest

from kvpatch import claims, control, private
from kvpatch.balance import loop
from kvpatch.balance.event import Event
from kvpatch.balance.loop import Balance
from kvpatch.balance.options import Options
from kvpatch.balance.records import Engine, Settings, Terms
from kvpatch.balance.seen import Found, silent

MIB = 1 << 20
DEVICE = 1000 * MIB


class Killed(BaseException):
    """As SIGKILL: nothing is cleaned up after it."""


class Machine:
    """Engines of a device, and what is asked of them."""

    def __init__(self, **limits):
        self.engines = {
            name: Engine(name, limit * MIB, 0, DEVICE, least=50 * MIB, born=number)
            for number, (name, limit) in enumerate(limits.items(), 1)
        }
        self.devices = dict.fromkeys(limits, "GPU-1")
        self.revisions = dict.fromkeys(limits, 0)
        self.said = []
        self.asked = []
        self.steps = 0
        self.killed_at = -1
        self.now = 0.0
        self.gives = {}  # what requests still use after a lower limit
        self.late = set()  # take a limit after nobody waits for it any longer
        self.refuses = {}
        self.before_answer = lambda name: None
        self.unheard = {}
        self.alone = {}  # the limits that they take without the loop

    def change(self, name, **changes):
        sizes = {
            part: value * MIB
            if isinstance(value, int) and part not in ("waiting", "born")
            else value
            for part, value in changes.items()
        }
        self.engines[name] = replace(self.engines[name], **sizes)

    def _step(self):
        if self.steps == self.killed_at:
            raise Killed
        self.steps += 1

    def look(self, before, alone):
        self._step()
        self.alone = dict(alone)
        free = DEVICE - sum(one.mapped for one in self.engines.values())
        found = {}
        for name, one in self.engines.items():
            seen = Found(
                one, self.devices[name], free, (f"model-{name}",), revision=self.revisions[name]
            )
            found[name] = seen if one.answers else silent(seen, "it does not answer")
        return found

    def set_limit(self, found, size, patience):
        self._step()
        name = found.engine.name
        self.before_answer(name)
        if name in self.refuses:
            raise control.Refused(self.refuses[name])
        if name not in self.engines:
            raise control.Unanswered(f"{name} ended before it had answered")
        if found.revision != self.revisions[name]:
            raise control.Refused("its limit was set by somebody else")
        self.asked.append((name, size // MIB))
        if name in self.late:
            raise control.Unanswered(f"{name} has not answered within 5 s")
        self.take(name, size)
        self._step()
        return size

    def take(self, name, size):
        """Keep to a limit, as the engine's own thread does it."""
        one = self.engines[name]
        left = max(size, self.gives.get(name, 0) * MIB)
        self.engines[name] = replace(one, limit=size, mapped=min(one.mapped, left))
        self.revisions[name] += 1

    def balance(self, dry=False, **options):
        return Balance(
            Options(**options),
            self.said.append,
            dry=dry,
            settings=Settings(page=MIB),
            look=self.look,
            set_limit=self.set_limit,
            unheard=lambda known: self.unheard,
            clock=lambda: self.now,
            wall=lambda: self.now,
        )

    def lines(self):
        """What was said, without the time, since it was last asked."""
        lines = [one.line.partition(" ")[2] for one in self.said]
        self.said.clear()
        return lines

    def check(self):
        """Every engine can map what it may, and a longest request fits it."""
        assert sum(one.held for one in self.engines.values()) <= DEVICE
        assert all(one.limit >= one.least for one in self.engines.values())


@pytest.fixture
def machine():
    """Two engines that were balanced; one of them has requests that wait."""
    made = Machine(chat=300, code=700)
    made.change("chat", mapped=300, needs=480, waiting=3)
    made.change("code", mapped=700)
    return made


def test_who_gives_comes_before_who_gets_and_it_is_said_why(machine):
    machine.balance().round()
    assert machine.asked == [("code", 400), ("chat", 600)]
    assert machine.lines() == [
        "chat: is here, with 300 MiB at most",
        "code: is here, with 700 MiB at most",
        "code: 700 MiB -> 400 MiB, because it has no requests, and others need memory",
        "chat: 300 MiB -> 600 MiB, because 3 of its requests wait",
    ]
    machine.check()


def test_a_round_in_which_nothing_is_due_sets_nothing_and_says_nothing(machine):
    balance = machine.balance()
    balance.round()
    machine.change("chat", mapped=590, waiting=0)
    asked = list(machine.asked)
    machine.said.clear()
    machine.now += 1
    balance.round()
    assert machine.asked == asked
    assert machine.said == []


def test_a_dry_run_sets_nothing_and_says_the_same_once(machine):
    balance = machine.balance(dry=True)
    for _ in range(3):
        balance.round()
        machine.now += 5
    assert machine.asked == []
    assert machine.lines()[2:] == [
        "code: would be 700 MiB -> 400 MiB, because it has no requests, and others need memory",
        "chat: would be 300 MiB -> 600 MiB, because 3 of its requests wait",
    ]


def test_no_more_is_promised_than_was_given(machine):
    machine.gives = {"code": 650}
    machine.balance().round()
    assert machine.asked == [("code", 400), ("chat", 350)]
    machine.check()


@pytest.fixture
def three(machine):
    """Two of them give; one says its limit at once, and goes on to map as before for a while."""
    machine.change("code", limit=350, mapped=350)
    machine.engines["slow"] = Engine("slow", 350 * MIB, 0, DEVICE, least=50 * MIB, born=3)
    machine.devices["slow"], machine.revisions["slow"] = "GPU-1", 0
    machine.change("chat", needs=800)
    return machine


@pytest.mark.parametrize(
    ("chat", "slow", "asked"),
    [
        ("takes it", "answers", [("code", 50), ("chat", 600), ("slow", 50), ("chat", 900)]),
        ("takes it", "is late", [("code", 50), ("chat", 600)]),
        ("refuses", "answers", [("code", 50), ("slow", 50)]),
    ],
)
def test_who_gets_does_not_wait_for_the_slowest_of_those_that_give(three, chat, slow, asked):
    told, tried, set_limit = threading.Event(), threading.Event(), three.set_limit
    may, refused = [350], []

    def with_a_slow_one(found, size, patience):
        name = found.engine.name
        if name == "slow":
            three.change(name, limit=size // MIB)
            told.set()
            assert tried.wait(10), "nobody is raised before it has given"
            if slow == "is late":
                raise control.Unanswered("slow has not answered within 20 s")
            may[0] = 50
        if name == "code":
            assert told.wait(10)
        if name == "chat":
            others = three.engines["code"].held + may[0] * MIB
            assert size + others <= DEVICE
            tried.set()
            if chat == "refuses":
                refused.append(size)
                raise control.Refused("it is on fire")
        return set_limit(found, size, patience)

    three.set_limit = with_a_slow_one
    three.balance().round()
    assert three.asked == asked
    assert len(refused) == (chat == "refuses"), "it is asked once in a round"
    three.check()


def test_engines_are_asked_while_one_gives(machine, monkeypatch):
    """Else they take the balance for killed, and undo what they were told."""
    monkeypatch.setattr(loop, "GETS", 0.01)
    look, looks, heard = machine.look, threading.Semaphore(0), []
    machine.look = lambda *asked: (looks.release(), look(*asked))[1]
    machine.before_answer = lambda name: heard.append(
        all(looks.acquire(timeout=5) for _ in range(5))
    )
    machine.change("chat", waiting=0, needs=0)
    machine.balance(terms={"code": Terms(ceiling=600 * MIB)}).round()
    assert heard == [True]
    assert machine.asked == [("code", 600)]


def test_a_limit_that_is_another_one_by_now_is_said(machine):
    set_limit = machine.set_limit
    machine.set_limit = lambda *asked: max(650 * MIB, set_limit(*asked))
    machine.balance().round()
    said = "code: 700 MiB -> 650 MiB, because its limit was set by somebody else meanwhile"
    assert said in machine.lines()


def test_an_engine_that_ends_while_it_gives_leaves_its_memory_to_the_other(machine):
    machine.before_answer = lambda name: machine.engines.pop("code", None)
    machine.balance().round()
    assert machine.asked == [("chat", 600)]
    assert machine.lines()[2:] == [
        "code: 700 MiB -> 400 MiB is not confirmed: code ended before it had answered",
        "code: has ended",
        "chat: 300 MiB -> 600 MiB, because 3 of its requests wait",
    ]


def test_an_engine_that_does_not_answer_keeps_its_memory_until_it_answers(machine):
    balance = machine.balance()
    machine.change("code", answers=False)
    balance.round()
    assert machine.asked == []
    assert machine.lines()[2:] == ["code: keeps 700 MiB: it does not answer"]
    balance.round()
    assert machine.said == []
    machine.change("code", answers=True)
    balance.round()
    assert machine.lines()[0] == "code: answers again"
    assert machine.asked == [("code", 400), ("chat", 600)]


def test_nobody_is_raised_for_one_that_refuses_to_give(machine):
    machine.refuses = {"code": "it is on fire"}
    machine.balance().round()
    assert machine.asked == []
    assert machine.lines()[2:] == ["code: stays at 700 MiB, and not 400 MiB: it is on fire"]
    machine.check()


def test_a_limit_that_somebody_set_meanwhile_is_kept(machine):
    def meanwhile(name):
        if name == "code" and not machine.revisions["code"]:
            machine.take("code", 650 * MIB)

    machine.before_answer = meanwhile
    balance = machine.balance()
    balance.round()
    # What the other one gave is there to be had.
    assert machine.asked == [("chat", 350)]
    assert "its limit was set by somebody else" in machine.lines()[2]
    machine.now += 20
    machine.change("chat", mapped=350)
    balance.round()
    assert machine.asked[1:] == [("code", 400), ("chat", 600)]


def test_a_higher_limit_that_was_not_answered_counts_until_it_is_known(machine):
    """The engine may take it when others have the memory."""
    machine.late = {"chat"}
    balance = machine.balance()
    balance.round()
    assert machine.asked == [("code", 400), ("chat", 600)]
    machine.change("chat", answers=False)
    machine.change("code", needs=900, waiting=5, mapped=400)
    machine.now += 100
    balance.round()
    assert machine.engines["code"].limit == 400 * MIB
    machine.take("chat", 600 * MIB)
    machine.check()


def test_no_limit_is_raised_by_a_look_of_long_ago(machine):
    """As of a balance that was stopped in between: engines have come, and taken memory."""

    def later(name):
        if name == "chat":
            machine.now += 60

    for name in ("chat", "more"):
        machine.engines[name] = Engine(name, 300 * MIB, 300 * MIB, DEVICE, 50 * MIB, 350 * MIB)
        machine.change(name, waiting=3, born=len(name))
        machine.devices[name], machine.revisions[name] = "GPU-1", 0
    machine.change("code", limit=400, mapped=400)
    machine.before_answer = later
    balance = machine.balance()
    balance.round()
    assert [name for name, _ in machine.asked] == ["code", "chat"]
    machine.before_answer = lambda name: None
    balance.round()
    assert machine.asked[-1][0] == "more"
    machine.check()


def test_a_newcomer_gets_its_share(machine):
    balance = machine.balance()
    balance.round()
    machine.change("chat", mapped=600, needs=0, waiting=0)
    machine.change("code", mapped=400)
    machine.engines["new"] = Engine("new", DEVICE, 0, DEVICE, least=50 * MIB, born=9)
    machine.devices["new"], machine.revisions["new"] = "GPU-1", 0
    machine.now += 100
    balance.round()
    assert "new: is here, with 1000 MiB at most" in machine.lines()
    assert 50 * MIB <= machine.engines["new"].limit < 650 * MIB
    machine.check()


def test_an_engine_that_started_again_is_another_one(machine):
    balance = machine.balance()
    balance.round()
    machine.lines()
    machine.change("code", born=77, mapped=0)
    balance.round()
    assert machine.lines()[:2] == ["code: has ended", "code: is here, with 400 MiB at most"]


def test_devices_are_balanced_by_themselves(machine):
    machine.devices["code"] = "GPU-2"
    machine.balance().round()
    assert ("code", 400) not in machine.asked


def test_engines_that_share_a_part_of_their_devices_are_left_alone(machine):
    machine.devices["code"] = "GPU-1, GPU-2"
    balance = machine.balance()
    balance.round()
    balance.round()
    assert machine.asked == []
    assert machine.lines()[2:] == [
        "chat: it shares a part of its devices with code, and is left as it is",
        "code: it shares a part of its devices with chat, and is left as it is",
    ], "said once"


def test_an_engine_whose_device_is_unknown_is_left_alone(machine):
    machine.devices["code"] = ""
    machine.change("code", mapped=400)
    machine.balance().round()
    assert machine.asked == [("chat", 600)]
    assert "code: it has not said which device it is on, and is left as it is" in machine.lines()


def test_rules_are_of_a_name_or_a_model_or_all(machine):
    terms = {"model-code": Terms(floor=600 * MIB), "nobody": Terms(), "*": Terms()}
    machine.balance(terms=terms).round()
    assert machine.asked == [("code", 600), ("chat", 400)]
    assert "no engine is called nobody" in machine.lines()


def test_memory_that_an_operator_names_is_all_there_is(machine):
    machine.balance(memory=800 * MIB).round()
    assert sum(one.limit for one in machine.engines.values()) <= 800 * MIB


def test_memory_that_others_take_is_not_promised(machine):
    look = machine.look

    def taken(*asked):
        seen = look(*asked)
        return {name: replace(one, free=max(0, one.free - 200 * MIB)) for name, one in seen.items()}

    machine.look = taken
    machine.change("code", mapped=100)
    machine.balance().round()
    assert sum(one.held for one in machine.engines.values()) <= 800 * MIB


def free(machine, balance, size):
    """Balance with so many MiB free."""
    seen = machine.look(balance.found, {})
    balance._see({name: replace(one, free=size * MIB) for name, one in seen.items()})
    balance._balance("GPU-1")


def test_what_is_free_may_seem_to_grow_a_little(machine):
    balance = machine.balance()
    balance.round()
    machine.change("chat", mapped=590, waiting=0)
    asked = list(machine.asked)
    for more in (10, 20, 30, 12, 29):
        free(machine, balance, more)
        assert balance._size("GPU-1") == DEVICE
    assert machine.asked == asked
    free(machine, balance, 32)
    assert balance._size("GPU-1") == DEVICE + 22 * MIB


def test_limits_never_promise_more_than_is_there_by_the_least_part_of_it(machine):
    balance = machine.balance()
    balance.round()
    machine.change("chat", waiting=0)
    for taken in (5, 3, 11, 10, 19):
        mapped = {name: min(one.limit, 380 * MIB) for name, one in machine.engines.items()}
        for name, size in mapped.items():
            machine.engines[name] = replace(machine.engines[name], mapped=size)
        free(machine, balance, DEVICE // MIB - sum(mapped.values()) // MIB - taken)
        held = sum(one.held for one in machine.engines.values())
        assert held <= DEVICE - taken * MIB, f"{taken} MiB are another program's"


def test_memory_that_others_take_while_an_engine_gives_is_not_promised(machine):
    look, taken = machine.look, [0]

    def after_the_first(*asked):
        seen = look(*asked)
        found = {name: replace(one, free=one.free - taken[0] * MIB) for name, one in seen.items()}
        taken[0] = 200
        return found

    machine.look = after_the_first
    machine.balance().round()
    assert machine.asked == [("code", 400), ("chat", 400)]


def test_engines_without_a_socket_are_named_once(machine):
    machine.unheard = {"old": "old does not listen (0.27.0): its memory is left to it"}
    balance = machine.balance()
    balance.round()
    balance.round()
    assert machine.lines().count("old does not listen (0.27.0): its memory is left to it") == 1


def test_it_ends_when_it_is_told_to(machine):
    stop = threading.Event()
    balance = machine.balance(every=0.01)
    thread = threading.Thread(target=balance.run, args=(stop,))
    thread.start()
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    balance.run(rounds=2)


def test_what_was_lent_is_given_back_at_the_end(machine):
    """As nobody looks any more at who waits."""
    machine.change("code", mapped=0, least=650)
    balance = machine.balance(terms={"code": Terms(lends=True)})
    balance.round()
    assert machine.engines["code"].limit < 650 * MIB
    machine.change("chat", mapped=0, needs=0, waiting=0)
    balance.run(rounds=1)
    machine.check()
    machine.balance(dry=True, terms={"code": Terms(lends=True)}).run(rounds=1)
    assert machine.engines["code"].limit >= 650 * MIB
    assert machine.alone == {}


def test_engines_know_what_is_theirs_if_it_is_killed_while_memory_is_lent(machine):
    balance = machine.balance()
    balance.round()
    balance.round()
    assert machine.alone == {}, "nothing is lent"
    machine.change("code", mapped=0, least=650, lends=True)
    machine.change("chat", mapped=600, needs=900)
    knew = []
    machine.before_answer = lambda name: knew.append("code" in machine.alone)
    for _ in range(2):
        machine.now += 30
        balance.round()
    assert knew
    assert all(knew), "before it lends"
    assert machine.engines["code"].limit < 650 * MIB
    assert sum(machine.alone.values()) <= DEVICE
    for name, size in sorted(machine.alone.items(), key=lambda one: one[0] == "code"):
        machine.take(name, size)
    assert machine.engines["code"].limit >= 650 * MIB
    machine.check()


def lent(machine, **options):
    """A balance that has lent what one request of an engine needs."""
    machine.change("code", mapped=0, least=650, lends=True)
    machine.change("chat", mapped=300, needs=800)
    balance = machine.balance(**options)
    balance.round()
    assert machine.engines["code"].limit < 650 * MIB
    return balance


@pytest.mark.parametrize("then", [None, {"answers": False}])
def test_who_is_gone_or_silent_before_it_lends_is_not_asked(machine, then):
    machine.change("code", mapped=0, least=650, lends=True)
    look, looks = machine.look, []

    def at_the_second(*asked):
        looks.append(asked)
        if len(looks) == 2:
            machine.change("code", **then) if then else machine.engines.pop("code")
        return look(*asked)

    machine.look = at_the_second
    machine.balance().round()
    assert len(looks) == 2
    assert "code" not in dict(machine.asked)


def test_what_was_lent_just_now_is_given_back_at_the_end(machine):
    """Also where all of them are to have more than there is, and nothing is moved at once."""
    machine.change("chat", least=400)
    balance = lent(machine)
    machine.change("chat", needs=900, mapped=machine.engines["chat"].limit // MIB)
    asked = len(machine.asked)
    balance.run(rounds=1)
    assert machine.asked[asked:] == [("chat", 400), ("code", 600)]
    assert machine.alone["code"] == 650 * MIB


@pytest.mark.parametrize("slow", [{"gives": {"chat": 900}}, {"late": {"code"}}])
def test_what_cannot_be_given_back_at_the_end_an_engine_takes_by_itself(machine, slow):
    balance = lent(machine)
    machine.change("chat", needs=0, waiting=0, mapped=machine.engines["chat"].limit // MIB)
    vars(machine).update(slow)
    balance.run(rounds=1)
    assert machine.engines["code"].limit < 650 * MIB
    assert machine.alone["code"] >= 650 * MIB
    assert sum(machine.alone.values()) <= DEVICE


@pytest.mark.parametrize("slow", [{"gives": {"chat": 900}}, {"late": {"code"}}])
def test_an_engine_knows_what_is_its_own_until_it_has_it_again(machine, slow):
    balance = lent(machine)
    vars(machine).update(slow)
    machine.change("chat", needs=0, waiting=0, mapped=machine.engines["chat"].limit // MIB)
    machine.change("code", waiting=1, needs=650)
    for _ in range(3):
        machine.now += 15
        balance.round()
        balance._look_once()
        assert machine.engines["code"].limit < 650 * MIB
        assert machine.alone["code"] >= 650 * MIB
    machine.gives, machine.late = {}, set()
    machine.take("chat", 150 * MIB)
    machine.take("code", 850 * MIB)
    balance.round()
    balance._look_once()
    assert machine.alone == {}


def test_an_engine_knows_it_while_other_devices_are_looked_at(machine):
    balance = lent(machine)
    for name, limit in (("a", 350), ("b", 650)):
        machine.engines[name] = Engine(name, limit * MIB, 350 * MIB, DEVICE, 50 * MIB, born=9)
        machine.devices[name], machine.revisions[name] = "GPU-0", 0
    machine.engines = dict(sorted(machine.engines.items()))  # theirs is planned first
    machine.change("a", needs=900, waiting=3)
    machine.change("b", least=650, lends=True)
    told = []
    machine.before_answer = lambda name: told.append(machine.alone.keys())
    balance.round()
    assert told[0] == {"a", "b", "chat", "code"}, "before it lends, and the others as before"


def test_who_is_to_lend_nothing_keeps_a_request(machine):
    machine.change("code", mapped=0, least=650, lends=True)
    machine.balance(terms={"code": Terms(lends=False)}).round()
    assert machine.engines["code"].limit >= 650 * MIB


@pytest.mark.parametrize("step", range(7))
def test_killed_at_any_step_every_engine_is_right_and_the_next_one_goes_on(machine, step):
    machine.killed_at = step
    try:
        machine.balance().round()
        killed = False
    except Killed:
        killed = True
    assert killed is (step < 6), "a round has six steps"
    machine.check()
    machine.killed_at = -1
    machine.now += 30
    machine.balance().round()
    machine.check()
    assert [one.limit // MIB for one in machine.engines.values()] == [600, 400]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BASE", tmp_path)
    yield tmp_path


WHO = r"another kvpatch balance of this user runs"


def test_a_second_balance_is_refused(home):
    with loop.alone(), pytest.raises(loop.Busy, match=WHO), loop.alone():
        raise AssertionError("two of them")
    with loop.alone():
        pass


def test_a_folder_of_claims_that_stays_locked_is_said(home, monkeypatch):
    claims.take("pool", "chat").release()
    monkeypatch.setattr(claims, "TO_TAKE", 0.1)
    said = f"a process that is stopped or hangs has kept {claims.folder()} locked for 0.1 s"
    locked = private.alone(claims.folder(), private.within(1))
    with locked, pytest.raises(loop.Busy, match=said), loop.alone():
        raise AssertionError("two of them, perhaps")


def test_an_event_for_programs():
    event = Event(5.0, "chat", "limit", "it may", before=1, limit=2)
    assert json.loads(event.json) == {
        "at": 5.0,
        "name": "chat",
        "what": "limit",
        "why": "it may",
        "before": 1,
        "limit": 2,
        "dry": False,
    }
    assert json.loads(Event(5.0, "", "note", "a sentence").json) == {
        "at": 5.0,
        "what": "note",
        "why": "a sentence",
        "dry": False,
    }


def test_a_name_does_not_reach_the_terminal_as_it_is():
    assert "\x1b" not in Event(5.0, "a\x1b[31m", "ended").line
