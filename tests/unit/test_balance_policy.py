"""Who may map how much: the policy of ``kvpatch balance``, a function."""

import random
from dataclasses import replace

import pytest

from kvpatch.balance import policy
from kvpatch.balance.records import Engine, Past, Settings, Terms

MIB = 1 << 20
DEVICE = 1000 * MIB
SETTINGS = Settings(page=MIB)


def engine(name, limit, mapped=None, **changes):
    """An engine, whose sizes are MiB; it has mapped all that it may unless it is told."""
    sizes = {
        part: value * MIB if part in ("least", "needs", "most", "found") else value
        for part, value in changes.items()
        if isinstance(value, int | float)
    }
    full = limit if mapped is None else mapped
    given = {"most": DEVICE, "least": 50 * MIB, "found": 0.0} | sizes
    return Engine(name, limit * MIB, full * MIB, **given)


def plan(*engines, past=None, now=1000.0, device=DEVICE, **terms):
    def of(name):
        return terms.get(name, Terms())

    return policy.plan(engines, device, past or {}, now, of, SETTINGS)


def limits(made):
    """The limits that change, in MiB."""
    return {move.name: move.limit // MIB for move in made.moves}


def rated(now=999.0, **rates):
    """Engines that have been there for long, and find so much in a second."""
    return {name: Past(0, now, 0.0, rate) for name, rate in rates.items()}


def test_what_nobody_wants_stays_where_it_is():
    past = rated(a=5.0, b=1.0)
    assert plan(engine("a", 500, 100), engine("b", 500, 100), past=past).moves == ()


def test_requests_that_wait_get_memory_at_once_from_who_has_none():
    waits = engine("a", 300, needs=480, waiting=3, running=2)
    made = plan(waits, engine("b", 700), past=rated(a=0.0, b=9.0))
    assert limits(made) == {"b": 400, "a": 600}
    gives, gets = made.moves
    assert gives.name == "b", "who gives comes first"
    assert gives.why == "it has no requests, and others need memory"
    assert gets.why == "3 of its requests wait"


def test_memory_that_nobody_has_goes_first():
    waits = engine("a", 300, needs=320, waiting=1, running=2)
    assert limits(plan(waits, engine("b", 400, 100), past=rated(a=0.0, b=9.0))) == {"a": 400}


def test_who_finds_more_gets_more_of_what_requests_do_not_need():
    made = plan(engine("a", 500), engine("b", 500), past=rated(a=3.0, b=1.0))
    assert limits(made) == {"b": 275, "a": 725}
    assert made.moves[1].why == "it is full, and finds more prefixes than others"


def test_nobody_is_said_to_need_what_the_device_does_not_have():
    made = plan(engine("a", 720, 0), engine("b", 720, 0))
    assert len(made.moves) == 2
    assert {move.why for move in made.moves} == {"the limits add up to more than 1000 MiB"}


def test_who_finds_no_prefix_is_not_said_to_find_more():
    gives, gets = plan(engine("a", 300), engine("b", 700), past=rated(a=0.0, b=0.0)).moves
    assert (gets.name, gets.why) == ("a", "it is full, and has less than its share")
    assert gives.why == "it has no requests, and others need memory"


def test_who_computes_and_gives_is_said_to_have_more_than_its_share():
    busy = engine("b", 700, needs=100, running=1)
    made = plan(engine("a", 300, needs=480, waiting=3, running=2), busy)
    assert made.moves[0].why == "it has more than its share, and others need memory"


def test_who_has_not_filled_its_limit_gets_no_more_for_prefixes():
    assert plan(engine("a", 500, 400), engine("b", 500), past=rated(a=3.0, b=1.0)).moves == ()


def test_who_is_new_gets_no_more_for_prefixes_before_it_is_known():
    past = rated(a=3.0, b=1.0)
    new = past | {"a": replace(past["a"], since=990.0)}
    assert plan(engine("a", 500), engine("b", 500), past=new).moves == ()
    assert plan(engine("a", 500), engine("b", 500), past=past).moves
    first = plan(engine("a", 500), engine("b", 400), past={})
    assert first.moves == (), "a balance that has just started moves for requests alone"


def test_small_differences_move_nothing():
    made = plan(engine("a", 510), engine("b", 490), past=rated(a=1.0, b=1.0))
    assert made.shares == {"a": DEVICE // 2, "b": DEVICE // 2}
    assert made.moves == ()


@pytest.mark.parametrize(("after", "moves"), [(9.0, False), (11.0, True)])
def test_memory_does_not_go_back_and_forth(after, moves):
    past = rated(a=3.0, b=1.0)
    first = plan(engine("a", 500), engine("b", 500), past=past)
    assert limits(first) == {"b": 275, "a": 725}
    turned = {name: replace(one, rate=4.0 - one.rate) for name, one in first.past.items()}
    seen = [engine("a", 725), engine("b", 275)]
    assert bool(plan(*seen, past=turned, now=1000.0 + after).moves) is moves


def test_who_has_just_given_memory_does_not_take_it_again_for_prefixes():
    past = rated(a=3.0, b=1.0)
    gave = past | {"a": replace(past["a"], lowered=995.0)}
    seen = engine("a", 500), engine("b", 100, 50)
    assert plan(*seen, past=gave).moves == ()
    assert limits(plan(*seen, past=past)) == {"a": 725}


def test_who_just_got_memory_gives_it_to_requests_that_wait():
    past = {"a": Past(0, 999.0, 0.0, 9.0, raised=999.0), "b": Past(0, 999.0, 0.0, 0.0)}
    made = plan(engine("a", 800), engine("b", 200, needs=400, waiting=1), past=past)
    assert limits(made) == {"a": 500, "b": 500}


def test_two_that_both_lack_memory_do_not_take_it_from_each_other_every_second():
    a = engine("a", 505, needs=2000, waiting=5, running=1)
    assert plan(a, engine("b", 495, needs=1900, waiting=5, running=1)).moves == ()


def test_an_engine_gets_what_it_needs_of_its_own_share_from_one_that_lacks_memory_too():
    flood = engine("a", 900, needs=5000, waiting=50, running=9)
    small = engine("b", 100, needs=160, waiting=1, running=1)
    past = {"a": Past(0, 999.0, raised=999.0), "b": Past(0, 999.0)}
    assert limits(plan(flood, small, past=past)) == {"a": 800, "b": 200}


def test_a_flood_leaves_others_their_share():
    flood = engine("a", 950, needs=9000, waiting=90, running=9)
    made = plan(flood, engine("b", 50, needs=900, waiting=9))
    assert made.shares == {"a": DEVICE // 2, "b": DEVICE // 2}


def test_priorities_count_where_there_is_not_enough():
    a = engine("a", 500, needs=5000, waiting=9)
    made = plan(a, engine("b", 500, needs=5000, waiting=9), a=Terms(priority=3.0))
    # Each has 50 for its longest request; what is left is shared by priority.
    assert made.shares == {"a": 725 * MIB, "b": 275 * MIB}
    alone = plan(engine("a", 500, needs=100), engine("b", 500, needs=700), a=Terms(priority=3.0))
    assert alone.shares["b"] >= 700 * MIB, "what who comes first does not need is others'"


def test_a_priority_counts_for_prefixes():
    past = rated(a=1.0, b=1.0)
    made = plan(engine("a", 500), engine("b", 500), past=past, a=Terms(priority=3.0))
    assert made.shares == {"a": 725 * MIB, "b": 275 * MIB}


WAITS = engine("a", 500, needs=5000, waiting=9)


@pytest.mark.parametrize(
    ("seen", "terms", "given"),
    [
        # A floor is kept whatever others need, an engine always has the memory of one request,
        ((WAITS, engine("b", 500)), {"b": Terms(floor=300 * MIB)}, {"b": 300, "a": 700}),
        ((WAITS, engine("b", 500, least=200)), {"b": Terms(floor=10 * MIB)}, {"b": 200, "a": 800}),
        # a ceiling is kept though memory is free,
        ((WAITS, engine("b", 100, 50)), {"a": Terms(ceiling=600 * MIB)}, {"a": 600}),
        # and nobody gets more than it started with.
        ((engine("a", 300, most=400, needs=5000, waiting=9), engine("b", 100, 50)), {}, {"a": 400}),
    ],
    ids=["floor", "one request", "ceiling", "at its start"],
)
def test_the_bounds_of_a_limit(seen, terms, given):
    assert limits(plan(*seen, **terms)) == given


def test_an_engine_below_its_floor_gets_it_though_it_asks_for_nothing():
    terms = {"b": Terms(floor=300 * MIB)}
    made = plan(engine("a", 1000), engine("b", 50, 1), past=rated(a=9.0, b=0.0), **terms)
    assert limits(made) == {"a": 700, "b": 300}


def test_a_limit_above_its_ceiling_is_lowered_at_once():
    past = {"a": Past(0, 999.0, raised=999.0)}
    made = plan(engine("a", 500, 10), past=past, a=Terms(ceiling=400 * MIB))
    assert limits(made) == {"a": 400}
    assert made.moves[0].why == "it may not have more"


def test_a_ceiling_below_one_request_does_not_stop_an_engine():
    made = plan(engine("a", 500, least=200), a=Terms(ceiling=100 * MIB))
    assert limits(made) == {"a": 200}
    assert made.notes == ("the ceiling of a is less than one of its requests needs, 200 MiB",)


def test_limits_that_promise_more_than_there_is_are_lowered():
    """As kvcached starts engines: each may map all of the device."""
    made = plan(engine("a", 1000, 100), engine("b", 1000, 100))
    assert limits(made) == {"a": 500, "b": 500}
    raised = {name: Past(0, 999.0, 0.0, 1.0, raised=999.0) for name in "ab"}
    assert limits(plan(engine("a", 1000, 100), engine("b", 1000, 100), past=raised))


def test_floors_that_do_not_fit_are_noted_and_cut_alike():
    made = plan(
        engine("a", 500), engine("b", 500), a=Terms(floor=900 * MIB), b=Terms(floor=900 * MIB)
    )
    assert made.shares == {"a": DEVICE // 2, "b": DEVICE // 2}
    assert made.notes == ("the floors of its engines add up to more than the device has for them",)


def test_no_limit_is_lowered_below_one_request():
    """A longer request would wait for ever if nobody raised it again, as after a kill."""
    silent = engine("c", 920, answers=False)
    made = plan(engine("a", 100), engine("b", 60), engine("d", 30), silent)
    assert limits(made) == {"a": 50, "b": 50}
    terms = {"a": Terms(floor=990 * MIB, priority=1000.0), "b": Terms(floor=990 * MIB)}
    assert limits(plan(engine("a", 500), engine("b", 500), **terms))["b"] == 50


def test_engines_have_pages_of_their_own():
    """Of a model of many layers one is larger than all that a small one needs."""
    small = engine("a", 10, needs=60, waiting=1, page=10 * MIB)
    large = engine("b", 990, 100, page=320 * MIB)
    assert limits(plan(small, large)) == {"a": 70, "b": 640}
    small = engine("a", 600, 10, page=10 * MIB, needs=10)
    large = engine("b", 320, waiting=1, needs=900, page=320 * MIB)
    assert limits(plan(small, large))["a"] >= 50


def test_a_limit_between_two_pages_is_raised_to_the_next_one():
    """As one that an operator has set: its last part is of no use."""
    one = engine("a", 150, needs=180, waiting=1, page=60 * MIB, least=60)
    assert limits(plan(one, engine("b", 100, 10, most=100))) == {"a": 180}


def test_a_newcomer_counts_as_one_of_the_others():
    past = rated(a=2.0, b=4.0)
    made = plan(engine("a", 500), engine("b", 500), engine("c", 0, least=0), past=past)
    assert made.past["c"].rate == pytest.approx(3.0, rel=0.01)
    assert made.shares["c"] == pytest.approx(300 * MIB, rel=0.05)


def test_another_engine_of_the_name_is_a_newcomer():
    past = {"a": Past(7, 999.0, 1e9, 100.0, raised=999.0), "b": Past(0, 999.0, 0.0, 1.0)}
    made = plan(engine("a", 500, born=8), engine("b", 500), past=past)
    assert made.past["a"].born == 8
    assert made.past["a"].rate == pytest.approx(1.0, rel=0.01)


def test_an_engine_that_does_not_answer_keeps_what_it_has():
    silent = engine("a", 600, answers=False, needs=5000)
    made = plan(silent, engine("b", 600, needs=900, waiting=2))
    assert limits(made) == {"b": 400}
    assert "a" not in made.shares


def test_the_memory_of_an_engine_that_ended_is_the_others():
    past = rated(a=1.0, b=1.0)
    made = plan(engine("b", 500, needs=900, waiting=1), past=past)
    assert limits(made) == {"b": 1000}
    assert set(made.past) == {"b"}


def test_of_a_suspended_engine_is_lent_what_it_will_not_take_back():
    """Its limit is lowered first: it takes no more than that when it is resumed."""
    asleep = engine("a", 500, 1, suspended=True, waiting=5, needs=800)
    past = {"a": Past(0, 999.0, 0.0, 9.0, peak=400.0 * MIB), "b": Past(0, 999.0, 0.0, 0.0)}
    assert plan(asleep, engine("b", 500, 400), past=past).moves == (), "nobody wants it"
    made = plan(asleep, engine("b", 500, 400, needs=600, waiting=2), past=past)
    assert made.shares == {"a": 50 * MIB, "b": 950 * MIB}
    assert limits(made) == {"a": 250, "b": 750}
    assert made.moves[0].why == "it is suspended, and others need memory"
    assert limits(plan(engine("a", 500, 1, suspended=True), engine("b", 500), past=past)) == {
        "a": 50,
        "b": 950,
    }, "for prefixes too"


@pytest.mark.parametrize(("waiting", "left"), [(0, 1), (2, 50)])
def test_a_suspended_engine_lends_what_a_request_needs_unless_one_waits(waiting, left):
    asleep = engine("a", 500, 1, suspended=True, waiting=waiting, lends=True)
    made = plan(asleep, engine("b", 500, needs=2000, waiting=2))
    assert made.shares["a"] == left * MIB


def test_a_floor_is_not_rounded_down_to_a_page():
    waits = engine("a", 500, needs=5000, waiting=9)
    floor = 300 * MIB - 1000
    other = engine("b", 500, page=7 * MIB, least=50)
    made = plan(waits, other, b=Terms(floor=floor))
    assert floor <= limits(made)["b"] * MIB < floor + 7 * MIB
    assert limits(made)["b"] % 7 == 0
    made = plan(waits, other, engine("c", 940, answers=False))
    assert limits(made)["b"] == 56, "one request has no use for a part of a page"


def test_what_an_engine_finds_counts_half_after_a_while():
    past = rated(a=8.0, b=0.0)
    made = plan(engine("a", 500), engine("b", 500), past=past, now=999.0 + SETTINGS.memory_of)
    assert made.past["a"].rate == pytest.approx(4.0)
    grown = plan(engine("a", 500, found=1), engine("b", 500), past=rated(a=0.0, b=0.0), now=1000.0)
    weight = 1 - 0.5 ** (1 / SETTINGS.memory_of)
    assert grown.past["a"].rate == pytest.approx(MIB * weight)


def test_a_counter_that_was_reset_or_is_missing_adds_nothing():
    before = {"a": Past(0, 999.0, 5.0 * MIB, 1.0), "b": Past(0, 999.0, 5.0 * MIB, 1.0)}
    missing = replace(engine("b", 500), found=None)
    made = plan(engine("a", 500, found=1), missing, past=before)
    assert 0.9 < made.past["a"].rate < 1.0
    assert 0.9 < made.past["b"].rate < 1.0


def test_a_need_that_has_just_passed_still_counts():
    past = {"a": Past(0, 999.0, 0.0, 0.0, peak=400.0 * MIB), "b": Past(0, 999.0, 0.0, 1.0)}
    made = plan(engine("a", 500), engine("b", 500), past=past)
    assert made.shares["a"] == pytest.approx(400 * 0.5**0.1 * 1.25 * MIB, rel=0.01)
    later = plan(engine("a", 500), engine("b", 500), past=past, now=2000.0)
    assert later.shares["a"] == 50 * MIB


def test_the_same_engines_in_another_order_get_the_same():
    a, b = engine("a", 500, needs=900, waiting=1), engine("b", 500)
    assert plan(a, b) == plan(b, a)


def granted(made, *engines, device=DEVICE):
    found = policy.grants(made.moves, engines, device, MIB)
    return {move.name: move.limit // MIB for move in found}


@pytest.mark.parametrize(
    ("engines", "raised"),
    [
        ((engine("a", 300), engine("b", 400)), {"a": 600}),
        # What running requests still use is not promised to another.
        ((engine("a", 300), engine("b", 400, 650)), {"a": 350}),
        ((engine("a", 300), engine("b", 700)), {}),
        # Who has ended or does not answer is not raised; a newcomer is counted.
        ((engine("b", 400),), {}),
        ((engine("a", 300, answers=False), engine("b", 400)), {}),
        ((engine("a", 300), engine("b", 400), engine("c", 200)), {"a": 400}),
    ],
)
def test_a_limit_is_raised_by_what_was_given(engines, raised):
    waits = engine("a", 300, needs=480, waiting=3, running=2)
    made = plan(waits, engine("b", 700), past=rated(a=0.0, b=9.0))
    assert granted(made, *engines) == raised


def test_two_that_get_share_what_there_is():
    a = engine("a", 100, needs=400, waiting=1)
    b = engine("b", 100, needs=400, waiting=1)
    made = plan(a, b, engine("c", 800))
    assert granted(made, a, b, engine("c", 600)) == {"a": 200, "b": 200}


LENDS = Terms(lends=True)


def test_what_one_request_needs_is_lent_while_none_waits():
    waits = engine("a", 600, needs=960, waiting=2, running=1)
    idle = engine("b", 400, 0, least=400)
    assert limits(plan(waits, idle)) == {}  # it is what one request of b needs
    assert limits(plan(waits, idle, b=LENDS)) == {"b": 1, "a": 999}, "all but a page"
    lends = replace(idle, lends=True)
    assert limits(plan(waits, lends)) == {"b": 1, "a": 999}, "it stores what it gives"
    assert limits(plan(waits, lends, b=Terms(lends=False))) == {}
    busy = engine("b", 400, 0, least=400, needs=40, running=1)
    assert limits(plan(waits, busy, b=LENDS)) == {"b": 50, "a": 950}, "with what it makes"


def test_it_comes_back_at_once_when_one_waits():
    past = {"a": Past(0, 999.0, peak=0.0, raised=999.0), "b": Past(0, 999.0, lowered=999.0)}
    waits = engine("b", 100, 100, least=400, needs=300, waiting=1)
    assert limits(plan(engine("a", 900), waits, past=past, b=LENDS)) == {"a": 600, "b": 400}


def test_what_is_lent_stays_above_the_floor():
    waits = engine("a", 600, needs=960, waiting=2, running=1)
    idle = engine("b", 400, 0, least=400)
    floor = Terms(floor=250 * MIB, lends=True)
    assert limits(plan(waits, idle, b=floor)) == {"b": 250, "a": 750}


def test_a_ceiling_below_one_request_is_noted_of_who_lends_too():
    made = plan(engine("b", 400, 0, least=400), b=Terms(ceiling=200 * MIB, lends=True))
    assert made.notes == ("the ceiling of b is less than one of its requests needs, 400 MiB",)


@pytest.mark.parametrize("seed", range(40))
def test_limits_stay_within_the_device_and_the_rules(seed):
    rng = random.Random(seed)
    terms = {
        name: Terms(
            rng.choice([0, 100]) * MIB,
            rng.choice([None, 500 * MIB]),
            rng.choice([1, 4]),
            lends=rng.random() < 0.3,
        )
        for name in "abcd"
    }
    world = {
        name: engine(name, rng.choice([100, 400, 1000]), 0, least=rng.choice([20, 60]))
        for name in "abcd"
    }
    past = {}
    for now in range(60):
        for name, one in world.items():
            needs = rng.choice([0, 0, 50, 300, 2000]) * MIB
            mapped = min(one.limit, rng.choice([one.mapped, one.limit, needs]))
            found = (one.found or 0) + rng.choice([0, 0, 50]) * MIB
            waiting = int(needs > one.limit)
            world[name] = replace(one, needs=needs, mapped=mapped, found=found, waiting=waiting)
            if rng.random() < 0.1:
                world[name] = replace(world[name], suspended=not one.suspended, mapped=MIB)
            if world[name].suspended:
                world[name] = replace(world[name], mapped=MIB)
        made = policy.plan(world.values(), DEVICE, past, now, terms.__getitem__, SETTINGS)
        past = made.past
        for move in [one for one in made.moves if not one.raises]:
            one = world[move.name]
            world[move.name] = replace(
                one, limit=move.limit, mapped=min(one.mapped, move.limit + rng.choice([0, 9 * MIB]))
            )
        for move in policy.grants(made.moves, world.values(), DEVICE, MIB):
            world[move.name] = replace(world[move.name], limit=move.limit)
        if now:
            assert sum(one.held for one in world.values()) <= DEVICE
        for name, one in world.items():
            least = max(terms[name].floor, one.least)
            kept = 1 - SETTINGS.lent if terms[name].lends else 1.0
            assert one.limit >= max(terms[name].floor, int(one.least * kept))
            assert one.limit <= max(terms[name].ceiling or DEVICE, least)
