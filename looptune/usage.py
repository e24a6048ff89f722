"""How the command line explains itself: short errors, defaults, examples, JSON that is readable."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

EXAMPLES = {
    "optimize": """\
examples:
  looptune optimize matmul 37 29 53 --epilogue bias,relu
  looptune optimize einsum 'mk,kn->mn' m=37 k=53 n=29 --strategy evolution --budget 0.5

The rate is the median of a run, +- is the interquartile range over it; over 10 % is noisy.""",
    "show": """\
examples:
  looptune show matmul 37 29 53 --what tree --what asm
  looptune show conv2d 1 64 56 56 64 3 3 --padding 1 --target avx2 --what explain""",
    "bench": """\
examples:
  looptune bench --suite looptune-test
  looptune bench --suite resnet50 --against numpy,torch --threads 2 --output resnet50.json

Suites: looptune-test (LoopTune's 25 test matmuls), looptune-all (all 2,197), core (180 real
operators), and those of the shipped workloads.json: ansor, bert-base, bert-large, convnext_t,
deepbench-conv-inference_device, deepbench-gemm-inference_device, dlrm-mlperf, gpt2-small,
libxsmm-smmbench, llama3.2-1b, loopnest-tests, looptune-conv-test, mlperf-tiny, mobilenet_v2,
mttkrp, numpy-einsum, onednn-tails, resnet18, resnet50, tccg, tccg-small, unet3d-kits19, wav2vec2,
whisper-tiny, winograd-gemm and others; or a file of its form.""",
    "peak": """\
examples:
  looptune peak
  looptune peak --threads 2 --target avx2 --json""",
    "db": """\
examples:
  looptune db list
  looptune db export found.jsonl""",
    "train": """\
examples:
  looptune train trial --share 0.05              a part of every stage: one or two minutes in all
  looptune train run1 --stages regress,clone     eleven minutes
  looptune train run1 --resume                   goes on with run1 if it was stopped

Stages with their minutes on one core: regress 3.5, imitate 6.5, clone 7.5, model 4, measured 3 (it
times kernels: leave the machine alone). FOLDER/policy.npz is the policy after the last stage that
is done: optimize(..., policy="FOLDER/policy.npz"), looptune eval --policy FOLDER/policy.npz.
Stopped, a run goes on with --resume: model and measured after their last iteration, other stages
from their beginning.""",
    "eval": """\
examples:
  looptune eval --model --most 5
  looptune eval --policy run1/policy.npz --sets matmul --output run1.jsonl""",
    "doctor": """\
examples:
  looptune doctor
  looptune doctor --json""",
}


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Epilogs as they are written; defaults where there is one and the words do not tell it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        if "default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Usage errors are one line, with a near name, and one that says how to ask for help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, **settings})

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with 2."""
        self.exit(2, f"{self.prog}: {hinted(message)}\ntry {self.prog} --help\n")


def hinted(message: str) -> str:
    """argparse's message, with the near one of the choices that it lists."""
    found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if found is None:
        return message
    near = difflib.get_close_matches(found[1], re.findall(r"[^', ]+", found[2]), 1)
    return message + (f"; did you mean {near[0]!r}?" if near else "")


WIDTH = 80


def encoded(value: object, depth: int = 0) -> str:
    """JSON, indented; what is short and holds no object is on one line."""
    match value:
        case Mapping():
            parts = [
                f"{json.dumps(str(key))}: {encoded(each, depth + 1)}" for key, each in value.items()
            ]
            left, right = "{}"
        case list() | tuple():
            flat = json.dumps(value, default=str)
            if len(flat) <= WIDTH and "{" not in flat:
                return flat
            parts = [encoded(each, depth + 1) for each in value]
            left, right = "[]"
        case _:
            return json.dumps(value, default=str)
    if not parts:
        return left + right
    inner = ",".join(f"\n{' ' * (depth + 1)}{part}" for part in parts)
    return f"{left}{inner}\n{' ' * depth}{right}"
