"""Base of all settings: dataclasses whose fields have a default, help text and limits, from which flags are derived.

`flag("…")` gives a field these, and `--help` shows them. The command line turns `max_num_seqs` into `--max-num-seqs`.
"""

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar

from pdserve import plugins
from pdserve.errors import not_imported

# Bounds of numbers that have a lower limit only: beyond, some clock, queue or header overflows, long after the start.
LARGEST_FLOAT, LARGEST_INT = 1e9, 10**15


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Values that a setting may have: numbers in a range, or one of `choices`, or a name in an entry-point group.

    Attributes:
        infinite: infinity is one of them.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    infinite: bool = False
    choices: tuple[str, ...] = ()
    plugins: str = ""

    def admit(self, value: Any) -> bool:
        return not (
            (self.least is not None and not value >= self.least)
            or (self.above is not None and not value > self.above)
            or (self.most is not None and not value <= self.most)
            or (
                self.choices
                and value not in self.choices
                and not (self.plugins and value in plugins.names(self.plugins))
            )
        )

    def exceeded(self, value: Any) -> float | None:
        """Return the bound of numbers that have a lower limit only, if a value is beyond it; else None."""
        if self.most is not None or (self.least is None and self.above is None):
            return None
        bound = LARGEST_FLOAT if isinstance(value, float) else LARGEST_INT
        return bound if value > bound and not (self.infinite and value == math.inf) else None

    def __str__(self) -> str:
        """Return the limits such that "must be …" reads well; empty if there are none."""
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}{', or of a package' if self.plugins else ''}"
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        low = f"at least {self.least}" if self.least is not None else ""
        low = f"more than {self.above}" if self.above is not None else low
        return " and ".join(part for part in (low, f"at most {self.most}" if self.most is not None else "") if part)


def flag(
    help: str,
    default: Any = MISSING,
    *,
    secret: bool = False,
    variable: str | None = None,
    group: str | None = None,
    package: str | None = None,
    **limits: Any,
) -> Any:
    """Return a dataclass field with its help text; a secret one is left out of `repr`.

    Args:
        variable: environment variable that sets the flag too. All users of a machine can read its command lines.
        group: heading in the help of this flag and of those that follow it in its class; default: the class's `GROUP`.
        package: that of an extra without which it can only have its default, or be "memory".
        limits: of `Limits`.
    """
    metadata = {"help": help, "variable": variable, "group": group, "package": package, "limits": Limits(**limits)}
    return field(default=default, repr=not secret, metadata=metadata)


def describe(setting: "Field[Any]") -> str:
    """Return the help text of a setting with its limits."""
    text, limits = setting.metadata["help"], str(setting.metadata["limits"])
    return f"{text}; {limits}" if limits else text


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings.

    Each class says which of its settings, also inherited ones, have no effect beside others. Of these, `x` holds if it is not
    at its default, and `x=1|2` if it has one of these values; what only some subclasses have does not hold in others.

    Attributes:
        ONLY_WITH: setting → others of which one must hold; none: it has no effect at all.
        NOT_WITH: setting → others none of which may hold.
    """

    ONLY_WITH: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    NOT_WITH: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        """Raise `ValueError` for a setting that can never work."""
        for setting in fields(self):
            value, limits = getattr(self, setting.name), setting.metadata["limits"]
            if value is None:
                continue
            name = _flag_of(setting.name)
            if not limits.admit(value):
                raise ValueError(f"{name} must be {limits}, not {value}")
            if (bound := limits.exceeded(value)) is not None:
                raise ValueError(f"{name} must be at most {bound:g}, not {value}")

    def check_effects(self) -> None:
        """Raise `ValueError` for a setting that has no effect. One of the environment may be for other processes."""
        for name, reason in self.without_effect().items():
            variable = type(self).__dataclass_fields__[name].metadata["variable"]
            if not variable or os.environ.get(variable) != getattr(self, name):
                raise ValueError(reason)

    def without_effect(self) -> dict[str, str]:
        """Return the settings that are not at their defaults and have no effect, each with the reason."""
        found: dict[str, str] = {}
        for setting in fields(self):
            if getattr(self, setting.name) == setting.default:
                continue
            name = _flag_of(setting.name)
            for kind in type(self).__mro__:
                needed = vars(kind).get("ONLY_WITH", {}).get(setting.name)
                if needed is not None and not any(map(self._holds, needed)):
                    without = " or ".join(_flag_of(one) for one in needed if hasattr(self, one.partition("=")[0]))
                    advice = f"without {without}: add that, or" if without else "here:"
                    found.setdefault(setting.name, f"{name} has no effect {advice} leave it out")
                for other in filter(self._holds, vars(kind).get("NOT_WITH", {}).get(setting.name, ())):
                    reason = f"{name} has no effect beside {_flag_of(other)}: leave one of them out"
                    found.setdefault(setting.name, reason)
        return found

    def _holds(self, condition: str) -> bool:
        name, _, values = condition.partition("=")
        setting, value = type(self).__dataclass_fields__.get(name), getattr(self, name, None)
        return value in values.split("|") if values else setting is not None and value != setting.default

    def check_packages(self) -> None:
        """Raise SetupError if a setting needs a package that is not installed."""
        for setting in fields(self):
            package = setting.metadata["package"]
            if package and getattr(self, setting.name) not in (setting.default, "memory") and not is_installed(package):
                raise not_imported(package, ModuleNotFoundError(name=package))


def _flag_of(condition: str) -> str:
    """Return a condition of `Settings` as on the command line."""
    name, _, values = condition.partition("=")
    return f"--{name.replace('_', '-')}{values and ' '}{' or '.join(values.split('|'))}"


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing more than the packages that it is in."""
    parent = module.rpartition(".")[0]
    return (not parent or is_installed(parent)) and importlib.util.find_spec(module) is not None


def shared_settings(source: Settings, target: type[Settings]) -> dict[str, Any]:
    """Return the settings of `source` that a `target` has too."""
    names = {setting.name for setting in fields(target)}
    return {setting.name: getattr(source, setting.name) for setting in fields(source) if setting.name in names}
