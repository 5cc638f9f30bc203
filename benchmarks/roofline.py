"""Roofline profiles beside published timings: the error at each point of roofline_points.csv, as a table."""

import argparse
import csv
import statistics
from dataclasses import dataclass
from pathlib import Path

from pdserve.profile.profile import StepModel
from pdserve.tools.roofline.estimate import Estimate
from pdserve.tools.roofline.shape import load

POINTS = Path(__file__).with_name("roofline_points.csv")


@dataclass(frozen=True)
class Row:
    """A published figure and its estimate, in the unit of its task."""

    point: dict[str, str]
    published: float
    estimated: float

    @property
    def error(self) -> float:
        """Of the time that the figure stands for."""
        ratio = self.estimated / self.published
        return (1 / ratio if self.point["task"] == "out tok/s" else ratio) - 1

    @property
    def counts(self) -> bool:
        return self.point["counts"] == "yes"


def rows() -> list[Row]:
    """Return all points, those that do not count last."""
    lines = [line for line in POINTS.read_text().splitlines() if not line.startswith("#")]
    return [row_of(point) for point in csv.DictReader(lines)]


def row_of(point: dict[str, str]) -> Row:
    batch, prompt, answer, gpus = (int(point[name]) for name in ("batch", "input", "output", "tp"))
    kv_size = 1.0 if point["source"] == "trt-llm" and point["weights"] == "fp8" else 2.0
    context = prompt + answer / 2
    step = Estimate(load(point["model"]), point["gpu"], gpus, point["weights"], kv_size, context).step
    task, published = point["task"], float(point["value"])
    if task == "decode":
        return Row(point, published, 1e3 * step.decode_seconds(batch, batch * prompt))
    if task == "prefill":
        return Row(point, published, 1e3 * step.prefill_seconds(batch * prompt, batch * prompt**2 / 2))
    seconds = run_seconds(step, batch, prompt, answer)
    return Row(point, published, 1e3 * seconds if task == "run" else batch * answer / seconds)


def run_seconds(step: StepModel, batch: int, prompt: int, answer: int) -> float:
    """Return the seconds of prefill and all decode steps of a batch."""
    decode = sum(step.decode_seconds(batch, batch * (prompt + done)) for done in range(1, answer))
    return step.prefill_seconds(batch * prompt, batch * prompt**2 / 2) + decode


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = rows()
    print("| source | GPUs | model | weights | task | batch | tokens | published | roofline | error of the time |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in found:
        one = row.point
        tokens = one["input"] if one["task"] in ("decode", "prefill") else f"{one['input']} + {one['output']}"
        cells = [
            one["source"],
            f"{one['tp']} {one['gpu']}",
            one["model"].partition("/")[2],
            one["weights"],
            one["task"],
        ]
        cells += [one["batch"], tokens, f"{row.published:.4g}", f"{row.estimated:.4g}", f"{row.error:+.0%}"]
        print("| " + " | ".join(cells) + (" |" if row.counts else " (aside) |"))
    errors = [abs(row.error) for row in found if row.counts]
    print(f"\n{len(errors)} points count: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}.")


if __name__ == "__main__":
    main()
