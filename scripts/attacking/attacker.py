"""The attacker's process: one kind of attack again and again, or valid requests that burn as much CPU.

    python -m attacking.attacker TARGET SECONDS KIND
    python -m attacking.attacker TARGET SECONDS control CPU_SHARE COUNT KIND

Prints a JSON object: the attacks made, the share of a core that this process used, and the first fault.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

from attacking import answers, bodies, connections, instances
from attacking.target import ENDED, Target

KINDS: dict[str, Callable[[Target], None]] = {
    function.__name__: function
    for function in (
        connections.endless_header,
        connections.many_headers,
        connections.silent_connections,
        connections.upgrades,
        connections.odd_framing,
        connections.descriptions,
        connections.wrong_keys,
        bodies.wrong_types,
        bodies.detokenize,
        bodies.unfinished_bodies,
        bodies.long_names,
        bodies.many_bad_words,
        bodies.all_log_probabilities,
        bodies.deep_bodies,
        bodies.grammar_bombs,
        bodies.slow_masks,
        bodies.log_injection,
        answers.left_streams,
        answers.unread_streams,
        answers.burst,
        answers.invalid_batch,
        answers.many_batches,
        answers.stored_responses,
        instances.rogue_instances,
        instances.silent_instances,
        instances.silent_callers,
        instances.unfinished_calls,
        instances.watches,
    )
}
CONTROL = "control"
ONE_TOKEN = [{"max_tokens": 1, "prompt": "Once upon a time"}]
# An attack by streams costs the instances as many tokens as valid streams do: its control asks for the same, as often, and
# reads them, which takes more CPU time than leaving them; of slow masks it leaves them, too: a word may take a minute. The
# attacks by bursts and batches contain valid work, which is their control's, as often and within the quota.
VALID: dict[str, Callable[[Target], None]] = {
    "left_streams": partial(answers.read_streams, bodies=answers.SHORT),
    "unread_streams": partial(answers.read_streams, bodies=answers.LONG),
    "grammar_bombs": bodies.new_grammars,
    "slow_masks": bodies.quick_masks,
    "burst": partial(answers.burst, size=answers.VALID_BURST),
    "many_batches": partial(answers.many_batches, metadata=[{}]),
}
PERIOD_S = 0.05  # between two valid requests: what the attacker's quota allows


def attack(target: Target, kind: str, seconds: float) -> tuple[int, str]:
    """Attack until the time is over or an attack is neither refused nor served; return the number and the fault."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try:
            KINDS[kind](target)
        except (RuntimeError, ValueError, *ENDED) as error:
            return count, repr(error)
        count += 1
    return count, ""


def behave(target: Target, seconds: float, share: float, attacks: int, kind: str) -> tuple[int, str]:
    """Send valid requests within the quota, and spin for what is left of a share of a core.

    Args:
        attacks: of this kind in such a time.
    """
    valid = VALID.get(kind)
    ask = valid or partial(answers.read_streams, bodies=ONE_TOKEN)
    period_s = seconds / attacks if valid and attacks else PERIOD_S
    begin, due, count = time.monotonic(), 0.0, 0
    while (elapsed := time.monotonic() - begin) < seconds:
        has_used_share = time.process_time() >= share * elapsed
        if elapsed >= due and (valid or not has_used_share):
            ask(target)
            due, count = elapsed + period_s, count + 1
        elif has_used_share:
            time.sleep(0.005)
    return count, ""


def main(target: Target, seconds: float, kind: str, share: float = 0.0, attacks: int = 0, of: str = "") -> None:
    begin = time.monotonic()
    count, fault = behave(target, seconds, share, attacks, of) if kind == CONTROL else attack(target, kind, seconds)
    used = time.process_time() / (time.monotonic() - begin)
    print(json.dumps({"count": count, "cpu_share": used, "fault": fault}))


if __name__ == "__main__":
    url, length, which, share, attacks, of = [*sys.argv[1:], "0", "0", ""][:6]
    main(Target.from_json(url), float(length), which, float(share), int(attacks), of)
