"""Settings of fleets as dimensions of a plan: which values are compared. Plain decisions on plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.config import POLICY_NAMES
from pdserve.errors import SetupError
from pdserve.profile.profile import Profile
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.simulator.fleet import Fleet

POLICIES = tuple(name for name in POLICY_NAMES if name != "session")  # simulated requests have no sessions
ITL_TARGET = "itl_target_ms"  # the one that is a field of `Fleet`


@dataclass(frozen=True)
class Dimension:
    """A setting of fleets.

    Attributes:
        name: of the field of `FleetConfig`, or `ITL_TARGET`.
        values: those to compare; the first is that of a fleet that does not name the setting.
        on_splits: (name, value) of settings that fleets of prefill and decode have with a value other than None.
    """

    name: str
    values: tuple[Any, ...]
    on_splits: tuple[tuple[str, Any], ...] = ()

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def value(self, fleet: Fleet) -> Any:
        """Return the setting of a fleet."""
        return fleet.itl_target_ms if self.name == ITL_TARGET else dict(fleet.settings).get(self.name, self.values[0])

    def put(self, fleet: Fleet, value: Any) -> Fleet:
        """Return the fleet with another value."""
        settings = {
            name: one for name, one in fleet.settings if name != self.name and (name, one) not in self.on_splits
        }
        if value is not None and not fleet.both:
            settings |= dict(self.on_splits)
        if self.name == ITL_TARGET:
            return replace(fleet, itl_target_ms=value, settings=tuple(sorted(settings.items())))
        settings |= {} if value == self.values[0] else {self.name: value}
        return replace(fleet, settings=tuple(sorted(settings.items())))

    def variants(self, fleet: Fleet) -> list[Fleet]:
        """Return the fleet with each value, its own first."""
        values = dict.fromkeys([self.value(fleet), *self.values])
        return [self.put(fleet, value) for value in values]

    def label(self, fleet: Fleet) -> str:
        """Return the value of a fleet as text."""
        value = self.value(fleet)
        if value is None:
            return "off" if self.name == ITL_TARGET else "auto"
        return f"{value:g}" if isinstance(value, float) else str(value)


def dimensions(
    config: PlanConfig, profile: Profile, itl_targets: Sequence[float | None], ttft_target: float | None = None
) -> list[Dimension]:
    """Return the dimensions that the settings name, each with the value of the plain setting first.

    Args:
        ttft_target: milliseconds; the routers' `--ttft-target-ms` where prefill and decode instances have an ITL target.

    Raises:
        SetupError: a value has the wrong form, or the profile has no such connector.
    """
    schemes = tuple(profile.transfers)
    named: list[tuple[str, Any, Callable[[str], list[Any]]]] = [
        ("connector", config.connector or next(iter(schemes), ""), lambda text: _choices(text, schemes)),
        ("policy", config.policy, lambda text: _choices(text, POLICIES)),
        ("max_num_batched_tokens", config.max_num_batched_tokens or profile.engine.max_num_batched_tokens, _tokens),
        ("local_prefill_tokens", config.local_prefill_tokens, _thresholds),
    ]
    on_splits = () if ttft_target is None else (("ttft_target_ms", ttft_target),)
    found = [Dimension(ITL_TARGET, tuple(itl_targets), on_splits)] if len(itl_targets) > 1 else []
    for name, given, parse in named:
        if text := getattr(config, f"try_{name}"):
            try:
                values = parse(text)
            except ValueError as error:
                raise SetupError(f"--try-{name.replace('_', '-')}: {error}") from None
            found.append(Dimension(name, tuple(dict.fromkeys([given, *values]))))
    return found


def _choices(text: str, known: Sequence[str]) -> list[Any]:
    values = list(known) if text == "all" else [part.strip() for part in text.split(",")]
    if wrong := [one for one in values if one not in known]:
        raise ValueError(f"there is no {wrong[0]!r}; there are {', '.join(known) or 'none in the profile'}")
    return values


def _tokens(text: str) -> list[Any]:
    values = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if 0 in values:
        raise ValueError(f"{text!r} is not such as 512,2048")
    return values


def _thresholds(text: str) -> list[Any]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part == "auto" or part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is not such as auto,0,256")
    return [None if part == "auto" else int(part) for part in parts]
