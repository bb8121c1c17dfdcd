"""Moving memory between the engines of a device, by what their requests need and find.

    from kvpatch import balance

    terms = {"chat": balance.Terms(floor=4 << 30, priority=2)}
    with balance.alone():
        balance.Balance(balance.Options(terms), tell=lambda event: print(event.line)).run()

A controller with a loop of its own uses the policy alone, which is a function: ``balance.plan``.

policy   who may map how much; pure
records  what goes into it, and what comes out
seen     the engines, from their sockets and status pages
options  what the operator sets
loop     look, plan, lower, raise
event    what is said about it
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpatch.balance.event import Event
    from kvpatch.balance.loop import Balance, Busy, alone
    from kvpatch.balance.options import Options, Wrong
    from kvpatch.balance.policy import grants, plan
    from kvpatch.balance.records import Engine, Move, Plan, Settings, Terms

_HOMES = {
    "loop": ("Balance", "Busy", "alone"),
    "options": ("Options", "Wrong"),
    "policy": ("grants", "plan"),
    "records": ("Engine", "Move", "Plan", "Terms", "Settings"),
    "event": ("Event",),
}
__all__ = [
    "Balance",
    "Busy",
    "Engine",
    "Event",
    "Move",
    "Options",
    "Plan",
    "Settings",
    "Terms",
    "Wrong",
    "alone",
    "grants",
    "plan",
]


def __getattr__(name: str) -> Any:  # a controller that plans by itself needs nothing else
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"kvpatch.balance.{home}"), name)
    raise AttributeError(f"module 'kvpatch.balance' has no attribute {name!r}")
