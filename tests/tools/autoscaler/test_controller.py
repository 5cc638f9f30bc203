"""The controller's decisions, with forecasts that the tests make up."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.tools.autoscaler.change import Change, difference, flips, shifted, starts, stops
from pdserve.tools.autoscaler.controller import Controller, Decision, Limits
from pdserve.tools.autoscaler.forecast import Rating
from pdserve.tools.autoscaler.observation import Member, Observation, Seen
from pdserve.tools.autoscaler.situation import Situation
from pdserve.tools.bench.requests import Request
from pdserve.tools.planner.targets import parse_targets
from tests.examples import examples

TARGETS = parse_targets("ttft.p90=500ms,itl.p99=50ms")
LIMITS = Limits(window=60.0, horizon=40.0, cooldown=20.0, start_timeout=100.0)
MORE_PREFILL, MORE_DECODE = Change("decode", "prefill"), Change("prefill", "decode")
Forecast = Callable[[Situation, Change | None], Rating]


def rating(attainment: float, ratio: float | None = None) -> Rating:
    return Rating(attainment, {}, ratio or (0.5 if attainment > 0.9 else 2.0), "TTFT p90 1 of 2 ms", 100)


def promise(**attainments: float) -> Forecast:
    """Return forecasts by the change in words, such as `start_1_prefill`; others are of `none`."""
    by_change = {name.replace("_", " "): rating(value) for name, value in attainments.items()}
    return lambda _, change: by_change.get(str(change) if change else "none", by_change["none"])


def observe(at: float, prefill: int = 2, decode: int = 2, draining: str = "", num_requests: int = 60) -> Observation:
    names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
    members = tuple(Member(name, name.split("-")[0], name == draining) for name in names)
    times = [at - 60 * (n + 0.5) / num_requests for n in reversed(range(num_requests))]
    requests = [Request(n, 10, ((f"own-{n}", 100),), input_tokens=100, at=time) for n, time in enumerate(times)]
    return Observation(at, members, tuple(Seen(one, 0.1, 0.02, 0.4, "length") for one in requests))


def controller(
    forecast: Forecast, prefill: int = 2, decode: int = 2, can_start: bool = False, most: int = 0
) -> Controller:
    """Return a controller that has seen the fleet with too few requests for a decision."""
    one = Controller(replace(LIMITS, most=most), TARGETS, forecast, can_start=can_start)
    assert one.decide(observe(900.0, prefill, decode, num_requests=9)).change is None
    return one


def test_a_controller_decides_as_soon_as_it_has_seen_requests() -> None:
    one = Controller(LIMITS, TARGETS, promise(none=0.4, **{"1 decode to prefill": 0.8}), can_start=False)
    assert one.decide(observe(1000.0)).change == MORE_PREFILL


@pytest.mark.parametrize("spread_s", [0.006, 0.3])
def test_a_burst_on_an_idle_fleet_is_no_rate(spread_s: float) -> None:
    """Sixty requests in 0.3 s, just before the controller looks again, are not two hundred per second from now on."""
    one = Controller(LIMITS, TARGETS, promise(none=0.99), can_start=False)
    burst = observe(1000.0)
    one.decide(replace(burst, at=990.0, requests=()))
    requests = [
        replace(seen, request=replace(seen.request, at=999.7 + spread_s * n / 60))
        for n, seen in enumerate(burst.requests)
    ]
    assert one.decide(replace(burst, requests=tuple(requests))).rate == 6.0


def test_the_fleet_is_left_as_it_is_while_it_meets_the_slo() -> None:
    decision = controller(promise(none=0.99)).decide(observe(1000.0))
    assert decision.change is None and decision.state == "meets" and "expected" in decision.reason
    assert (
        decision.seen is not None and decision.seen.attainment == 1.0 and decision.rate == pytest.approx(1.0, rel=0.01)
    )


def test_the_change_of_roles_that_promises_most_is_made() -> None:
    forecast = promise(none=0.4, **{"1 prefill to decode": 0.3, "1 decode to prefill": 0.8})
    decision = controller(forecast).decide(observe(1000.0))
    assert decision.change == MORE_PREFILL and decision.state == "misses"
    assert [one.change for one in decision.considered] == [
        "none",
        "1 prefill to decode",
        "1 decode to prefill",
        "1 decode to prefill, in the mean of two draws",
    ]


def test_more_instances_change_at_once_only_in_a_direction_that_helps() -> None:
    forecast = promise(none=0.2, **{"1 decode to prefill": 0.4, "2 decode to prefill": 0.95})
    decision = controller(forecast, 4, 4).decide(observe(1000.0, 4, 4))
    assert decision.change == replace(MORE_PREFILL, count=2)
    assert "2 prefill to decode" not in [one.change for one in decision.considered]


def test_more_instances_are_tried_if_one_only_shortens_the_queue() -> None:
    values = {
        "none": rating(0.0, 9.0),
        "1 decode to prefill": rating(0.0, 5.0),
        "2 decode to prefill": rating(0.5, 2.0),
    }
    one = controller(lambda _, change: values.get(str(change) if change else "none", values["none"]), 2, 4)
    assert one.decide(observe(1000.0, 2, 4)).change == replace(MORE_PREFILL, count=2)


def test_far_from_the_slo_a_clearly_shorter_queue_is_worth_a_change() -> None:
    values = {
        "none": rating(0.04, 8.0),
        "1 decode to prefill": rating(0.04, 7.9),
        "2 decode to prefill": rating(0.05, 5.0),
    }
    one = controller(lambda _, change: values.get(str(change) if change else "none", values["none"]), 2, 6)
    assert one.decide(observe(1000.0, 2, 6)).change == replace(MORE_PREFILL, count=2)
    near = {"none": rating(0.6, 1.5), "1 decode to prefill": rating(0.6, 1.1)}
    one = controller(lambda _, change: near.get(str(change) if change else "none", near["none"]))
    assert one.decide(observe(1000.0)).change is None, "few requests are late, and none is saved"


def test_more_good_requests_are_not_worth_a_longer_queue() -> None:
    values = {"none": rating(0.16, 3.5), "1 prefill to decode": rating(0.25, 6.5)}
    one = controller(lambda _, change: values.get(str(change) if change else "none", values["none"]))
    assert one.decide(observe(1000.0)).change is None


def test_a_better_fleet_is_looked_for_if_percentiles_hide_bad_requests() -> None:
    values = {"none": rating(0.7, 0.9), "1 decode to prefill": rating(0.95, 0.7)}
    one = controller(lambda _, change: values.get(str(change) if change else "none", values["none"]))
    assert one.decide(observe(1000.0)).change == MORE_PREFILL


def test_a_small_gain_is_not_worth_a_change() -> None:
    decision = controller(promise(none=0.40, **{"1 decode to prefill": 0.41})).decide(observe(1000.0))
    assert decision.change is None and "no change would help" in decision.reason


def test_nothing_is_decided_while_a_change_is_under_way_or_just_done() -> None:
    one = controller(promise(none=0.4, **{"1 decode to prefill": 0.8}))
    assert one.decide(observe(1000.0)).change == MORE_PREFILL
    assert "decode-1 drains" in one.decide(observe(1005.0, draining="decode-1")).reason
    assert "15 s more to wait after the change" in one.decide(observe(1005.0, 3, 1)).reason
    assert one.decide(observe(1021.0, 3, 1)).state == "misses"


def test_no_change_is_undone_within_the_time_of_its_forecast() -> None:
    forecasts = {"now": promise(none=0.4, **{"1 decode to prefill": 0.8})}
    one = controller(lambda situation, change: forecasts["now"](situation, change), 3, 3)
    assert one.decide(observe(1000.0, 3, 3)).change == MORE_PREFILL
    forecasts["now"] = promise(none=0.4, **{"1 prefill to decode": 0.8})
    held = one.decide(observe(1059.0, 4, 2))
    assert held.change is None and "would undo" in next(c.rejected for c in held.considered if c.rejected)
    assert one.decide(observe(1061.0, 4, 2)).change == MORE_DECODE


def test_no_change_is_undone_within_a_minute_however_short_its_forecast() -> None:
    forecasts = {"now": promise(none=0.4, **{"1 decode to prefill": 0.8})}
    short = replace(LIMITS, horizon=10.0, cooldown=5.0)
    one = Controller(short, TARGETS, lambda *of: forecasts["now"](*of), can_start=False)
    assert one.decide(observe(1000.0, 3, 3)).change == MORE_PREFILL
    forecasts["now"] = promise(none=0.4, **{"1 prefill to decode": 0.8})
    assert one.decide(observe(1059.0, 4, 2)).change is None
    assert one.decide(observe(1061.0, 4, 2)).change == MORE_DECODE


def test_a_controller_that_follows_another_one_does_not_undo_its_changes() -> None:
    forecasts = {"now": promise(none=0.4, **{"1 decode to prefill": 0.8})}
    first = controller(lambda situation, change: forecasts["now"](situation, change), 3, 3)
    assert first.decide(observe(1000.0, 3, 3)).change == MORE_PREFILL
    forecasts["now"] = promise(none=0.4, **{"1 prefill to decode": 0.8})
    second = Controller(LIMITS, TARGETS, lambda *of: forecasts["now"](*of), can_start=False)
    second.recall(first.changes)
    held = second.decide(observe(1031.0, 4, 2))
    assert held.change is None and second.changes == first.changes
    assert "would undo" in next(c.rejected for c in held.considered if c.rejected)
    assert second.decide(observe(1061.0, 4, 2)).change == MORE_DECODE


def test_a_forecast_is_for_as_long_as_answers_take_and_protects_its_change() -> None:
    """Most answers still run, and at their speed take 60 s; by the horizon alone, a change would be protected for 60 s."""
    forecasts, situations = {"now": promise(none=0.4, **{"1 decode to prefill": 0.8})}, list[Situation]()

    def forecast(situation: Situation, change: Change | None) -> Rating:
        situations.append(situation)
        return forecasts["now"](situation, change)

    def slow(at: float, prefill: int, decode: int) -> Observation:
        seen = observe(at, prefill, decode)
        ended = [replace(seen.requests[0], e2e_s=59.0)]
        running = [replace(one, itl_p99_s=None, e2e_s=None, finish_reason="") for one in seen.requests[1:]]
        tokens = [max(1, round((at - one.at) / 6)) for one in running]
        running = [
            replace(one, request=replace(one.request, output_tokens=count))
            for one, count in zip(running, tokens, strict=True)
        ]
        return replace(seen, requests=(*ended, *running))

    one = controller(forecast, 3, 3)
    made = one.decide(slow(1000.0, 3, 3))
    assert made.change == MORE_PREFILL and made.horizon == pytest.approx(60, abs=10)
    assert max(load.at or 0.0 for load in situations[0].expected) > 1000 + LIMITS.horizon + 5
    forecasts["now"] = promise(none=0.4, **{"1 prefill to decode": 0.8})
    assert one.decide(slow(1000 + LIMITS.horizon + LIMITS.cooldown + 1, 4, 2)).change is None
    assert one.decide(slow(1001 + made.horizon + LIMITS.cooldown, 4, 2)).change == MORE_DECODE


def test_roles_are_changed_rather_than_instances_started() -> None:
    forecast = promise(none=0.4, start_1_decode=0.99, **{"1 decode to prefill": 0.95})
    assert controller(forecast, can_start=True, most=9).decide(observe(1000.0)).change == MORE_PREFILL
    forecast = promise(none=0.4, start_1_decode=0.99, **{"1 decode to prefill": 0.6})
    assert controller(forecast, can_start=True, most=9).decide(observe(1000.0)).change == Change("", "decode")
    assert controller(forecast, can_start=True, most=4).decide(observe(1000.0)).change == MORE_PREFILL  # no budget
    assert controller(forecast, can_start=False, most=9).decide(observe(1000.0)).change == MORE_PREFILL


def test_a_budget_that_is_too_small_is_said() -> None:
    one = controller(promise(none=0.4, start_1_decode=0.44, start_2_decode=0.99), can_start=True, most=5)
    decision = one.decide(observe(1000.0))
    assert decision.change is None and decision.reason.endswith("and no change within 5 instances would help")
    rejected = {considered.change: considered.rejected for considered in decision.considered if considered.rejected}
    assert rejected == {"start 1 prefill and 1 decode": "the budget is 5 instances"}
    assert "start 2 decode" not in [one.change for one in decision.considered], "as one does not help"
    full = controller(promise(none=0.4, start_1_decode=0.99), can_start=True, most=4).decide(observe(1000.0))
    rejected = {considered.change: considered.rejected for considered in full.considered if considered.rejected}
    assert full.change is None and rejected == {
        "start 1 prefill": "the budget is 4 instances",
        "start 1 decode": "the budget is 4 instances",
        "start 1 prefill and 1 decode": "the budget is 4 instances",
    }


def test_an_instance_that_never_becomes_ready_is_given_up() -> None:
    one = controller(promise(none=0.4, start_1_decode=0.99), can_start=True, most=9)
    assert one.decide(observe(1000.0)).change == Change("", "decode")
    assert "is under way" in one.decide(observe(1099.0)).reason
    assert "did not come about in 100 s" in one.decide(observe(1101.0)).reason
    after = one.decide(observe(1125.0))
    assert after.change is None and "has not become ready" in after.considered[-1].rejected
    assert one.decide(observe(1710.0)).change == Change("", "decode")


def test_changes_by_others_are_noticed_and_respected() -> None:
    one = controller(promise(none=0.4, **{"1 decode to prefill": 0.8}))
    noticed = one.decide(observe(1000.0, 2, 3))
    assert noticed.change is None and "others changed the fleet, which was 2 decode, 2 prefill" in noticed.reason
    assert one.decide(observe(1021.0, 2, 3)).change == MORE_PREFILL


def test_a_change_by_a_person_is_seen_at_once_and_kept_though_another_is_under_way() -> None:
    forecasts = {"now": promise(none=0.4, start_1_decode=0.99)}
    one = controller(lambda *of: forecasts["now"](*of), 3, 3, can_start=True, most=9)
    assert one.decide(observe(1000.0, 3, 3)).change == Change("", "decode")
    assert "is under way" in one.decide(observe(1010.0, 3, 3)).reason
    seen = one.decide(observe(1020.0, 4, 2))  # its own start has not joined yet
    assert seen.change is None and "others changed the fleet" in seen.reason
    forecasts["now"] = promise(none=0.4, **{"1 prefill to decode": 0.8})
    held = one.decide(observe(1041.0, 4, 2))
    assert held.change is None and "would undo" in next(c.rejected for c in held.considered if c.rejected)
    assert one.decide(observe(1081.0, 4, 2)).change == MORE_DECODE


def test_what_one_draw_of_the_expected_load_promises_another_must_bear_out() -> None:
    """On a cliff one draw has requests come so that all are late, and another so that none is."""
    loads = list[tuple[float, ...]]()

    def cliff(situation: Situation, change: Change | None) -> Rating:
        times = tuple(load.at or 0.0 for load in situation.expected)
        loads.extend({times} - set(loads))
        is_first = times == loads[0]
        return rating((0.4 if change is None else 0.8) if is_first else (0.8 if change is None else 0.4))

    decision = controller(cliff).decide(observe(1000.0))
    assert decision.change is None and len(loads) == 2
    assert decision.considered[-1].change.endswith("in the mean of two draws")
    ends = Controller(
        replace(LIMITS, most=4),
        TARGETS,
        lambda of, change: rating(0.99, 0.7 if change is None else 0.5),
        can_start=True,
    )
    assert ends.decide(observe(1000.0)).change is not None


def test_instances_of_both_roles_start_at_once_if_that_promises_most() -> None:
    values = promise(
        none=0.1,
        **{"start 1 prefill": 0.2, "start 2 prefill": 0.3, "start 4 prefill": 0.3, "start 1 decode": 0.1},
        **{
            "start 1 prefill and 1 decode": 0.4,
            "start 2 prefill and 2 decode": 0.7,
            "start 3 prefill and 1 decode": 0.85,
        },
    )
    one = controller(values, can_start=True, most=8)
    decision = one.decide(observe(1000.0))
    assert decision.change == Change("", "prefill", 3, 1) and str(decision.change) == "start 3 prefill and 1 decode"
    assert "is under way" in one.decide(observe(1010.0, 4, 2)).reason
    assert [(made.after, made.count) for made in one.changes] == [("prefill", 3), ("decode", 1)]
    one.forget()
    assert not one.changes


def test_an_instance_ends_only_if_the_others_suffice_at_the_highest_rate() -> None:
    rates = []

    def forecast(situation: Situation, change: Change | None) -> Rating:
        rates.append(len(situation.expected) / 40)
        return rating(0.99) if change is None or (change.before == "decode" and situation.now > 1000) else rating(0.5)

    one = controller(forecast, can_start=True, most=4)
    assert one.decide(observe(960.0, num_requests=600)).change is None
    decision = one.decide(observe(1021.0))
    assert decision.change == Change("decode", "") and "expected without it" in decision.reason
    assert rates[-1] > 5 > 2 > rates[-4]  # of the stop in two draws, and of the fleet as it is
    tight = controller(lambda _, change: rating(0.99, 0.5 if change is None else 0.9), can_start=True, most=4)
    assert tight.decide(observe(1000.0)).change is None


@pytest.mark.parametrize(("later_s", "is_remembered"), [(720, True), (1000, False)])
def test_a_burst_is_remembered_for_a_quarter_of_an_hour_wherever_windows_begin(
    later_s: int, is_remembered: bool
) -> None:
    """Bursts come minutes apart, and each would meet a fleet that has just become smaller. A window in the middle of two
    others has all of it."""
    rates = []

    def forecast(situation: Situation, change: Change | None) -> Rating:
        rates.append(len(situation.expected) / 40)
        return rating(0.99, 0.5 if change is None else 0.9)

    one = controller(forecast, can_start=True, most=4)
    quiet = observe(930.0)
    burst = [
        replace(seen, request=replace(seen.request, at=940.0 + n / 6)) for n, seen in enumerate(quiet.requests * 4)
    ]
    for at in range(930, 1000, 10):
        requests = [seen for seen in (*quiet.requests, *burst) if at - 60 < seen.at <= at]
        one.decide(replace(quiet, at=float(at), requests=tuple(requests)))
    for at in range(1000, 920 + later_s, 60):
        one.decide(observe(float(at)))
    del rates[:]
    one.decide(observe(980.0 + later_s))
    assert (max(rates) > 3) is is_remembered


def test_a_started_instance_does_not_end_within_the_time_of_its_forecast() -> None:
    forecasts = {"now": promise(none=0.4, start_1_decode=0.99)}
    one = controller(lambda situation, change: forecasts["now"](situation, change), can_start=True, most=5)
    assert one.decide(observe(1000.0)).change == Change("", "decode")
    forecasts["now"] = lambda _, change: rating(0.99, 0.9 if change == Change("prefill", "") else 0.5)
    held = one.decide(observe(1021.0, 2, 3))
    assert held.change is None and "would undo" in next(c.rejected for c in held.considered if c.rejected)
    assert one.decide(observe(1082.0, 2, 3)).change == Change("decode", "")


def test_a_start_that_takes_long_is_protected_when_it_is_there_and_later_forecasts_know() -> None:
    situations, forecasts = list[Situation](), {"now": promise(none=0.4, start_1_decode=0.99)}

    def forecast(situation: Situation, change: Change | None) -> Rating:
        situations.append(situation)
        return forecasts["now"](situation, change)

    one = controller(forecast, can_start=True, most=5)
    decision = one.decide(observe(1000.0))
    assert decision.change == Change("", "decode") and situations[-1].start_up_s == 0 and decision.horizon == 40
    assert "is under way" in one.decide(observe(1090.0)).reason
    forecasts["now"] = lambda _, change: rating(0.99, 0.9 if change == Change("prefill", "") else 0.5)
    held = one.decide(observe(1098.0, 2, 3))
    assert held.change is None and held.horizon == 90 + 40 / 2 and situations[-1].start_up_s == 90
    assert "would undo" in next(c.rejected for c in held.considered if c.rejected)
    protected = 1000 + 40 + LIMITS.cooldown + 90
    assert one.decide(observe(protected - 1, 2, 3)).change is None
    assert one.decide(observe(protected + 60, 2, 3)).change == Change("decode", "")


def test_too_little_traffic_tells_nothing() -> None:
    assert "tell too little" in controller(promise(none=0.1)).decide(observe(1000.0, num_requests=9)).reason


def test_advice_that_is_not_taken_changes_nothing() -> None:
    one = controller(promise(none=0.4, **{"1 decode to prefill": 0.8}))
    assert one.decide(observe(1000.0)).change == MORE_PREFILL
    one.forget()
    assert "after the advice" in one.decide(observe(1001.0)).reason
    assert one.decide(observe(1022.0)).change == MORE_PREFILL


@settings(max_examples=examples(1 / 4), deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 3)), min_size=12, max_size=12), st.integers(0, 1 << 30))
def test_whatever_forecasts_say_limits_hold(values: list[tuple[float, float]], seed: int) -> None:
    """Never below the least of a role, above the budget of instances or of changes, or back within a forecast's time."""
    limits = replace(LIMITS, least=Counter(prefill=2, decode=1), most=8, max_changes=9)

    def forecast(situation: Situation, change: Change | None) -> Rating:
        attainment, ratio = Random(f"{seed} {situation.now} {change}").choice(values)
        return rating(attainment, ratio)

    one = Controller(limits, TARGETS, forecast, can_start=True)
    counts, made = Counter(prefill=3, decode=3), list[Decision]()
    for step in range(60):
        decision = one.decide(observe(1000.0 + 10 * step, counts["prefill"], counts["decode"]))
        if decision.change is None:
            continue
        counts = decision.change.apply(counts)
        assert counts["prefill"] >= 2 and counts["decode"] >= 1 and sum(counts.values()) <= 8
        recent = [other for other in made if decision.at - other.at < other.horizon + limits.cooldown]
        assert not any(other.change and decision.change.undoes(other.change) for other in recent)
        assert all(decision.at - other.at >= limits.cooldown for other in made)
        made.append(decision)
    assert len(made) <= 9


def test_changes_respect_the_least_and_the_most() -> None:
    counts, least = Counter(prefill=1, decode=8), Counter(prefill=1, decode=3)
    assert [list(map(str, one)) for one in flips(counts, least)] == [
        [],
        ["1 decode to prefill", "2 decode to prefill", "4 decode to prefill"],
    ]
    assert list(flips(Counter(prefill=1, decode=1), Counter())) == [[], []]
    assert [[str(one) for one in each][:2] for each in starts()] == [
        ["start 1 prefill", "start 2 prefill"],
        ["start 1 decode", "start 2 decode"],
        ["start 1 prefill and 1 decode", "start 2 prefill and 2 decode"],
    ]
    assert [str(one) for one in shifted(Change("", "prefill", 1, 2))] == [
        "start 3 decode",
        "start 2 prefill and 1 decode",
    ]
    assert difference({"prefill": 3, "decode": 3}, {"prefill": 4, "decode": 2}) == [MORE_PREFILL]
    assert difference({"prefill": 3, "decode": 3}, {"prefill": 3, "decode": 5}) == [Change("", "decode", 2)]
    assert difference({"prefill": 3, "decode": 3}, {"prefill": 3, "decode": 1}) == []
    assert [str(one) for one in stops(counts, least)] == ["stop 1 decode"] and not list(
        stops(counts, Counter(decode=8))
    )


def test_changes_of_a_large_fleet_are_multiples_of_what_one_simulated_instance_stands_for() -> None:
    forecast = promise(none=0.2, **{"4 decode to prefill": 0.4, "8 decode to prefill": 0.95})
    decision = controller(forecast, 24, 40).decide(observe(1000.0, 24, 40))
    assert decision.change == replace(MORE_PREFILL, count=8)
    assert [one.change for one in decision.considered][:2] == ["none", "4 prefill to decode"]
