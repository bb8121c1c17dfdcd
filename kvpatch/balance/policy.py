"""Who may map how much of a device: what is seen goes in, limits come out, and that is all.

    every engine has its floor, and at least the memory of one request, of which it may lend a part
    then what its requests need that are there, those that wait included, or were a moment ago
    then what is left, for prefixes: by the rate at which prefixes are found, on the device or in
    the CPU tier, because who finds none has no use for more

Each of the three is shared by priority: of two engines that want more than there is, one of
priority 2 gets twice as much as one of priority 1. Why this and not another way is in
docs/balance.md: it was chosen by a simulation.

A share is not a limit yet. Memory moves from an engine to another one only if that has filled what
it has, and neither for small differences nor back and forth. Requests that wait for memory get it
at once from who does not need it, and from everybody if that brings their engine no more than its
share. What nobody wants stays where it is.

Sizes are bytes of one device; of an engine with several ranks, bytes of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from kvpatch.balance.records import Engine, Move, Past, Plan, Settings, Terms, rounded_up
from kvpatch.sizes import readable

_USUAL = Settings()


class _Seen(NamedTuple):
    """What a plan is made of: the engines that answer, and by name what each wants, and was."""

    ours: list[Engine]
    room: int
    wanted: Mapping[str, tuple[int, int, int]]
    then: Mapping[str, Past]
    now: float
    settings: Settings

    def page(self, one: Engine) -> int:
        return one.page or self.settings.page


def plan(
    engines: Iterable[Engine],
    device: int,
    past: Mapping[str, Past],
    now: float,
    terms: Callable[[str], Terms] = lambda name: Terms(),
    settings: Settings = _USUAL,
) -> Plan:
    """Return who gets how much of a device, and what is to be done for it ``now``, on any clock."""
    by_name = sorted(engines, key=lambda one: one.name)
    longest = {one.name: min(one.least, one.most) for one in by_name}
    seen = [_now(one, lends(one, terms(one.name)), settings) for one in by_name]
    then = _remember(seen, past, now, settings)
    ours = [one for one in seen if one.answers]
    # Of an engine that does not answer nothing can be had.
    room = device - sum(one.held for one in seen if not one.answers)
    wanted = {
        one.name: _wanted(one, then[one.name].peak, terms(one.name), settings) for one in ours
    }
    looked = _Seen(ours, room, wanted, then, now, settings)
    shares = _shares(looked, terms)
    notes = []
    floors = sum(least for least, _, _ in wanted.values())
    if ours and floors > room:
        notes.append("the floors of its engines add up to more than the device has for them")
    for one in ours:
        ceiling, least = terms(one.name).ceiling, longest[one.name]
        if ceiling is not None and ceiling < least:
            notes.append(
                f"the ceiling of {one.name} is less than one of its requests needs, "
                f"{readable(least)}"
            )
    limits = _limits(looked, shares)
    moves = sorted(
        (_move(one, looked, limits, device) for one in ours),
        key=lambda move: (move.raises, move.name),
    )
    changed = tuple(move for move in moves if move.limit != move.before)
    for move in changed:
        before = then[move.name]
        then[move.name] = (
            replace(before, raised=now) if move.raises else replace(before, lowered=now)
        )
    return Plan(changed, shares, then, tuple(notes))


def lends(one: Engine, terms: Terms) -> bool:
    """Whether an engine lends what one of its requests needs."""
    return one.lends if terms.lends is None else terms.lends


def _now(one: Engine, lends: bool, settings: Settings) -> Engine:
    """Return an engine without what it does not need now: as it is suspended, or none waits."""
    waiting = one.waiting  # also of a suspended one: it needs them once it is resumed
    if one.suspended:
        one = replace(one, needs=0, running=0, waiting=0)
    if lends and not waiting:
        page = one.page or settings.page  # it goes on to answer with that
        one = replace(one, least=min(one.least, max(page, int(one.least * (1 - settings.lent)))))
    return one


def grants(moves: Iterable[Move], engines: Iterable[Engine], device: int, page: int) -> list[Move]:
    """Return which engines get how much, once others have given what they could of the moves."""
    now = {one.name: one for one in engines}
    free = max(0, device - sum(one.held for one in now.values()))
    wanted = [
        replace(move, before=now[move.name].limit)
        for move in moves
        if move.raises and move.name in now and now[move.name].answers
    ]
    wanted = [move for move in wanted if move.raises]
    asked = {
        # What it has mapped above its limit, it has already.
        move.name: max(0, move.limit - now[move.name].held)
        for move in wanted
    }
    got = _fill(free, {name: (size, 1.0) for name, size in asked.items()})
    made = []
    for move in wanted:
        limit = min(move.limit, now[move.name].held + int(got[move.name]))
        limit = limit if limit == move.limit else _rounded(limit, now[move.name].page or page)
        if limit > move.before:
            made.append(replace(move, limit=limit))
    return made


def _remember(
    seen: list[Engine], past: Mapping[str, Past], now: float, settings: Settings
) -> dict[str, Past]:
    found: dict[str, Past] = {}
    new = []
    for one in seen:
        before = past.get(one.name)
        if before is None or before.born != one.born:
            new.append(one)
            continue
        apart = max(now - before.seen, 1e-3)
        weight = 0.5 ** (apart / settings.memory_of)
        # A counter that is missing, or was reset, says nothing about this time.
        rate = before.rate * weight
        if one.found is not None and before.found is not None and one.found >= before.found:
            rate += (one.found - before.found) / apart * (1 - weight)
        peak = max(float(one.needs), before.peak * 0.5 ** (apart / settings.peak_of))
        found[one.name] = replace(before, seen=now, found=one.found, rate=rate, peak=peak)
    # Who is new counts as one of those that are there, until it shows what it needs.
    rates = [past.rate for past in found.values()]
    for one in new:
        rate = sum(rates) / len(rates) if rates else 0.0
        found[one.name] = Past(one.born, now, one.found, rate, one.needs, now)
    return found


def _wanted(one: Engine, peak: float, terms: Terms, settings: Settings) -> tuple[int, int, int]:
    """Return the least, the need and the most of an engine, in bytes."""
    most = min(one.most, one.most if terms.ceiling is None else terms.ceiling)
    page = one.page or settings.page
    # Limits are of whole pages: of half a page more than a floor nothing can be used.
    least = min(rounded_up(max(terms.floor, one.least, page), page), one.most)
    most = max(most, least)  # a ceiling below one request would be an engine that stands still
    need = min(most, max(least, int(peak * (1 + settings.spare))))
    return least, least if one.suspended else need, most


def _shares(seen: _Seen, terms: Callable[[str], Terms]) -> dict[str, int]:
    ours, wanted = seen.ours, seen.wanted
    weight = {one.name: max(terms(one.name).priority, 1e-6) for one in ours}
    left = float(max(0, seen.room))
    have = dict.fromkeys(wanted, 0.0)

    def give(upto: Callable[[str], float], by: Mapping[str, float]) -> None:
        nonlocal left
        more = _fill(left, {name: (max(0.0, upto(name) - have[name]), by[name]) for name in have})
        for name, size in more.items():
            have[name] += size
            left -= size

    give(lambda name: wanted[name][0], weight)
    give(lambda name: wanted[name][1], weight)
    rates = {name: weight[name] * seen.then[name].rate for name in have}
    most = {one.name: wanted[one.name][0 if one.suspended else 2] for one in ours}
    give(most.__getitem__, rates)
    give(most.__getitem__, weight)  # nobody has found anything yet
    return {one.name: _rounded(have[one.name], seen.page(one)) for one in ours}


def _fill(room: float, wanted: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Share ``room`` by weight, to none more than it wants; without a weight it gets nothing."""
    got = dict.fromkeys(wanted, 0.0)
    open_ = {name for name, (size, weight) in wanted.items() if size > 0 and weight > 0}
    while open_ and room > 0:
        total = sum(wanted[name][1] for name in open_)
        # Who is the first to have all that it wants?
        level = min((wanted[name][0] - got[name]) / wanted[name][1] for name in open_)
        level = min(level, room / total)
        for name in open_:
            got[name] += level * wanted[name][1]
        room -= level * total
        done = {name for name in open_ if wanted[name][0] - got[name] <= 1e-6 * wanted[name][0]}
        if not done:
            break
        open_ -= done
    return got


def _alike(room: float, wanted: Mapping[str, float]) -> dict[str, float]:
    """Share ``room`` so that each gets the same part of what it wants."""
    return _fill(room, {name: (size, size) for name, size in wanted.items()})


def _limits(seen: _Seen, shares: Mapping[str, int]) -> dict[str, int]:
    """Return the limits that are to be set now: steps towards the shares that are worth it."""
    ours, settings = seen.ours, seen.settings
    limits = {one.name: one.limit for one in ours}
    pages = {one.name: seen.page(one) for one in ours}
    gets: dict[str, int] = {}
    pressed = entitled = False
    for one in ours:
        least, need, most = seen.wanted[one.name]
        share, then = shares[one.name], seen.then[one.name]
        if one.limit > most:
            limits[one.name] = most  # more than it may have, or can use
            continue
        if one.limit < min(need, share):
            gets[one.name] = min(need, share) - one.limit  # requests wait for it, or soon will
            waits = one.waiting > 0 or one.limit < least
            pressed = pressed or waits
            entitled = entitled or (waits and share >= need)
        full = one.mapped >= settings.full * one.limit
        known = seen.now - then.since >= settings.learn
        rested = seen.now - then.lowered >= settings.rest
        worth = share - one.limit >= settings.least_move * one.limit
        if full and known and rested and worth:
            gets[one.name] = share - one.limit
    free = seen.room - sum(max(limits[one.name], one.mapped) for one in ours)
    short = sum(gets.values()) - free
    if short > 0:
        gives = _gives(seen, limits, shares, pressed, entitled or free < 0)
        for name, size in _alike(short, gives).items():
            # Rounded down: what is left over stays with nobody.
            limits[name] = _rounded(limits[name] - size, pages[name])
    free = seen.room - sum(
        max(limits[one.name], one.mapped if limits[one.name] >= one.limit else 0) for one in ours
    )
    for name, size in _alike(max(0, free), gets).items():
        limits[name] = max(limits[name], _rounded(limits[name] + size, pages[name]))
    return limits


def _gives(
    seen: _Seen,
    limits: Mapping[str, int],
    shares: Mapping[str, int],
    pressed: bool,
    entitled: bool,
) -> dict[str, float]:
    gives = {}
    for one in seen.ours:
        # What is below one request is nobody's to give: it may be the last look that is taken.
        request = one.one_request(seen.page(one))
        over = limits[one.name] - max(shares[one.name], request)
        rested = seen.now - seen.then[one.name].raised >= seen.settings.rest
        worth = over >= seen.settings.least_move * limits[one.name]
        # Between two that both lack memory it would go back and forth. Limits that promise more
        # than there is are lowered.
        spare = shares[one.name] >= seen.wanted[one.name][1]
        at_once = entitled or (pressed and spare)
        if over > 0 and (at_once or (rested and worth)):
            gives[one.name] = float(over)
    return gives


def _move(one: Engine, seen: _Seen, limits: Mapping[str, int], device: int) -> Move:
    _, need, most = seen.wanted[one.name]
    limit, then = limits[one.name], seen.then
    others = [other for other in seen.ours if other is not one]
    if limit > one.limit:
        if one.waiting and one.limit < need:
            why = f"{one.waiting} of its requests wait"
        elif one.limit < need:
            why = "its requests need more than it has"
        elif all(then[one.name].rate > then[other.name].rate for other in others):
            why = "it is full, and finds more prefixes than others"
        else:
            why = "it is full, and has less than its share"
    elif one.limit > most:
        why = "it may not have more"
    elif not any(limits[other.name] > other.limit for other in others):
        why = f"the limits add up to more than {readable(device)}"
    elif one.suspended:
        why = "it is suspended, and others need memory"
    elif not (one.running or one.waiting):
        why = "it has no requests, and others need memory"
    else:
        why = "it has more than its share, and others need memory"
    return Move(one.name, one.limit, limit, why)


def _rounded(size: float, page: int) -> int:
    return int(size + 1e-6) // page * page
