"""The command `pdserve autoscale`: watches a fleet, or a simulated one, and advises or makes changes."""

import json
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pdserve.errors import SetupError
from pdserve.launchers.launcher import Launcher
from pdserve.profile.profile import Profile
from pdserve.tools.autoscaler.controller import Controller, Decision, Limits
from pdserve.tools.autoscaler.forecast import Forecaster, rate
from pdserve.tools.autoscaler.rehearsal import rehearse
from pdserve.tools.autoscaler.router_client import RouterClient
from pdserve.tools.bench.requests import Sample
from pdserve.tools.load_config import AutoscaleConfig
from pdserve.tools.planner.slo_file import load_targets
from pdserve.tools.planner.targets import Target
from pdserve.tools.simulator.fleet import Fleet, deployment_of, draw_requests, instance_model, load_profile, mean_rate
from pdserve.tools.simulator.simulation import Deployment, Simulation

log = logging.getLogger(__name__)

LEASE_INTERVALS = 6  # a lease is for so many intervals
MAX_TIMELINES = 1_000_000  # of a simulated router, which keeps all


class DecisionLog:
    """Prints decisions, and appends each as a JSON line to a file, if there is one.

    Raises:
        SetupError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._state = ""
        self._append("")

    def add(self, decision: Decision, *, is_made: bool) -> None:
        """Add a decision; one without a change is printed only if the state is another than before."""
        row = asdict(decision) | {"change": decision.change and str(decision.change), "made": is_made}
        self._append(json.dumps(row) + "\n")
        if decision.change is not None or decision.state != self._state:
            advice = "" if is_made or decision.change is None else " (advice; --apply makes it)"
            print(f"{_shape(decision)}: {decision}{advice}", flush=True)
        self._state = decision.state

    def _append(self, text: str) -> None:
        if not self._path:
            return
        try:
            with Path(self._path).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise SetupError(f"--decisions {self._path} cannot be written: {error.strerror}") from None


def _shape(decision: Decision) -> str:
    counts = decision.fleet
    fleet = Fleet(counts.get("prefill", 0), counts.get("decode", 0), counts.get("both", 0))
    return fleet.shape or "no instances"


def make_controller(config: AutoscaleConfig, profile: Profile, *, can_start: bool) -> tuple[Controller, Deployment]:
    """Return the controller, and the settings of simulated fleets, without instances.

    Raises:
        SetupError: the SLO is of an API key.
    """
    targets = load_targets(config.slo, config.slo_file)
    if key := next((one.group.key for one in targets if one.group.key), ""):
        raise SetupError(
            f"the SLO of key {key}: routers do not tell whose requests they had; give targets by prompt_tokens"
        )
    settings = deployment_of(config, profile, Fleet(itl_target_ms=config.itl_target_ms))
    settings = replace(settings, router=replace(settings.router, timelines=MAX_TIMELINES))
    forecaster = Forecaster(settings, instance_model(config, profile), targets, config.seed)
    return Controller(limits_of(config), targets, forecaster.forecast, can_start=can_start), settings


def limits_of(config: AutoscaleConfig) -> Limits:
    return Limits(
        window=config.window,
        horizon=config.horizon,
        cooldown=config.cooldown,
        start_timeout=config.start_timeout,
        least=Counter(prefill=config.min_prefill, decode=config.min_decode),
        most=config.max_instances,
        max_changes=config.max_changes,
    )


def run(config: AutoscaleConfig, stop: threading.Event, launcher: Launcher | None = None, key: str = "") -> None:
    """Watch the fleet until `stop` is set.

    Args:
        key: the routers' admin key; empty: that of the environment.

    Raises:
        SetupError: the settings are wrong, or a router does not respond at the beginning.
    """
    profile = load_profile(config)
    controller, _ = make_controller(config, profile, can_start=launcher is not None and config.max_instances > 0)
    decisions = DecisionLog(config.decisions)
    client = RouterClient(config.router.split(","), key)
    holder = config.holder or f"{socket.gethostname()}-{os.getpid()}"
    os.nice(10)  # forecasts must not take time from a router on the same machine
    try:
        client.observe(config.window)
        while not stop.is_set():
            try:
                step(config, controller, client, holder, decisions, launcher)
            except SetupError as error:
                log.warning("%s; the next attempt is in %g s", error, config.interval)
            except Exception:  # `pdserve up` would end the fleet with its controller
                log.exception(
                    "the controller failed; the fleet stays as it is until its next attempt, in %g s", config.interval
                )
            stop.wait(config.interval)
        try:
            client.hold_lease(holder, 0.0)
        except SetupError as error:
            log.warning("the lease is left to expire: %s", error)
    finally:
        client.close()


def step(
    config: AutoscaleConfig,
    controller: Controller,
    client: RouterClient,
    holder: str,
    decisions: DecisionLog,
    launcher: Launcher | None,
) -> None:
    """Observe, decide, and make the change if that is asked for.

    Raises:
        SetupError: a router does not respond or refuses, or the launcher fails; the controller has forgotten the change.
    """
    lease_s = LEASE_INTERVALS * config.interval
    if refusal := client.hold_lease(holder, lease_s):
        log.warning("it only watches: %s", refusal)
        return
    controller.recall(client.changes)
    seen = client.observe(config.window)
    decision = controller.decide(seen)
    is_made = False
    if decision.change is not None:
        try:
            if refusal := client.hold_lease(holder, lease_s, str(decision)):  # the forecasts took longer than the lease
                log.warning("a change is left out: %s", refusal)
                return
            if config.apply:
                client.make(decision.change, seen.members, launcher)
                is_made = True
        finally:
            if not is_made:
                controller.forget()
    decisions.add(decision, is_made=is_made)
    if is_made:
        client.hold_lease(holder, lease_s, changes=controller.changes)


def simulate(config: AutoscaleConfig) -> None:
    """Play the load in a simulation with the controller, and without it."""
    profile = load_profile(config)
    targets = load_targets(config.slo, config.slo_file)
    requests = draw_requests(config, mean_rate(config))
    controller, settings = make_controller(config, profile, can_start=config.max_instances > 0)
    fleet = replace(settings, prefill=config.prefill, decode=config.decode)
    decisions = DecisionLog(config.decisions)
    simulation = Simulation(fleet, instance_model(config, profile), config.seed)
    rehearsal = rehearse(
        simulation,
        controller.decide,
        requests,
        config.interval,
        config.window,
        lambda decision: decisions.add(decision, is_made=decision.change is not None),
    )
    fixed = Simulation(fleet, instance_model(config, profile), config.seed).play(requests)
    print()
    for name, samples, seconds in (
        ("with the controller", rehearsal.samples, rehearsal.instance_seconds),
        ("without", fixed.samples, fixed.seconds * (config.prefill + config.decode)),
    ):
        print(f"{name}: {_outcome(targets, samples)}, {seconds:.0f} instance-seconds")
    print(f"{len(rehearsal.changes)} changes")


def _outcome(targets: Sequence[Target], samples: Sequence[Sample]) -> str:
    rating = rate(targets, samples)
    return f"{rating.attainment:.1%} of {rating.count} requests good, {rating.worst}"
