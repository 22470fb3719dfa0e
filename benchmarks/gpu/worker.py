"""Measures some cases of one part and prints one JSON line when a case begins and one when it has ended."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, NotHere
from benchmarks.gpu.parts import PARTS


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    """Measure in order. The exit status is 1 after a case that fails: an error may spoil the device's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[*PARTS, "device"])
    parser.add_argument("device")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cases", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    bench = Bench.open(options.device, small=options.small)
    if options.part == "device":
        say({"device": bench.name()})
        return 0
    cases = PARTS[options.part].cases(options.small)
    for name in options.cases:
        say({"begins": name})
        try:
            say({"case": name, **cases[name](bench)})
        except NotHere as reason:
            say({"case": name, "not run": str(reason)})
        except Exception as error:  # any error of a case is its result
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            say({"case": name, "fails": f"{type(error).__name__}: {lines[0]}"[:300]})
            return 1
        if bench.is_cuda:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
