"""When a tier is late: to the second, and while another thread asks it."""

from typing import Any

from kvpatch.patches.secondary_tiers.timeout import Unanswered, progressed


def test_a_tier_is_late_after_its_limit_and_not_at_it():
    now = [0.0]
    unanswered = Unanswered(10, lambda: now[0])
    unanswered.asked("a")
    now[0] = 10.0
    assert not unanswered.late
    now[0] = 10.25
    assert unanswered.late


def test_a_task_whose_first_block_the_disk_never_answers_makes_the_tier_late():
    """No block has told ``progressed`` anything: what counts is when the task began."""
    now = [0.0]
    unanswered = Unanswered(10, lambda: now[0])
    seen = []

    def task():
        now[0] = 10.5
        seen.append(unanswered.late)

    unanswered.run("job", task)
    assert seen == [True]
    assert not unanswered.late


def test_each_block_that_the_disk_answers_starts_the_wait_anew_and_is_counted():
    now = [0.0]
    unanswered = Unanswered(10, lambda: now[0])
    seen, moved = [], []

    def task():
        for now[0] in (9.0, 18.0):
            progressed(96)
            seen.append(unanswered.late)

    unanswered.run("job", task, moved.append)
    progressed(96)  # of no task
    assert (seen, moved) == ([False, False], [96, 96])


def test_a_change_by_another_thread_is_looked_at_again():
    class Changing(dict[Any, float]):
        looks = 0

        def values(self):
            self.looks += 1
            if self.looks < 3:
                raise RuntimeError("dictionary changed size during iteration")
            return super().values()

    unanswered = Unanswered(10, lambda: 100.0)
    unanswered._since = Changing(a=0.0)
    assert unanswered.late
    assert unanswered._since.looks == 3
