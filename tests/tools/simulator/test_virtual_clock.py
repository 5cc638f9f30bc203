"""Virtual clock: events happen in order of time, and of their addition."""

from functools import partial

from pdserve.tools.simulator.virtual_clock import VirtualClock


def test_actions_of_the_same_interval_and_beginning_repeat_in_order() -> None:
    clock, seen = VirtualClock(), list[tuple[str, float]]()
    clock.at(0.75, lambda: clock.every(0.5, lambda: seen.append(("later", clock.time))))

    def see(name: str) -> None:
        seen.append((name, clock.time))

    for name in "ab":
        clock.every(0.5, partial(see, name))
        clock.every(1.0, partial(see, name.upper()))
    clock.run(until=lambda: clock.time >= 1.25)
    assert seen == [("a", 0.5), ("b", 0.5), ("A", 1.0), ("B", 1.0), ("a", 1.0), ("b", 1.0), ("later", 1.25)]
