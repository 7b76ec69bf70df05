r"""The toy, the demo and the tests of this DAPO implementation.

    python test_dapo.py              the demo: makes the toy, runs the five stages, ends with the before/after table
    pytest test_dapo.py              the tests

The toy: sums modulo 10, one step a line. The policy has a known flaw: a step that adds or subtracts 7 or 8 it sometimes
writes carelessly, with ? instead of =, and then it is often off by one. So from many states a good and a bad next step
are sampled, the careless mark can be learnt, and the truth V(s) can be computed.

    2+2-8+7-1+3=    2+2=4    4-8?7 (a slip: it is 6)    7+7=4    4-1=3    3+3=6    \boxed{6} (wrong: it is 5)
"""
import argparse
import itertools
import json
import math
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from generate import UserError, run_stage, stage_record

HERE = Path(__file__).parent

# ---------------------------------------------------------------------------------------------------------------------
# The toy: problems, demonstrations, tokenizer

OPERATIONS = 5
RISKY = (7, 8)    # operands of the steps at which the policy is careless ...
CARELESS = 0.6    # ... with this probability, and then ...
SLIP = 0.65       # ... off by one with this one
SYMBOLS = ["<pad>", "<eos>", "\n", *"0123456789+-=?", "\\boxed{", "}"]
ID = {symbol: number for number, symbol in enumerate(SYMBOLS)}
PROMPT_TOKENS = 2 * OPERATIONS + 2


def toy_problem(rng):
    """A sum like 2+2-8+7-1+3= -> (text, answer)."""
    digits = [rng.randrange(10) for _ in range(OPERATIONS + 1)]
    signs = [rng.choice("+-") for _ in range(OPERATIONS)]
    total = digits[0] + sum(digit if sign == "+" else -digit for sign, digit in zip(signs, digits[1:]))
    return "".join(f"{digit}{sign}" for digit, sign in zip(digits, [*signs, "="])), total % 10


def right_steps(problem):
    """The lines of the right solution, all written with =, and whether each is risky."""
    running, steps = int(problem[0]), []
    for sign, digit in zip(problem[1:-1:2], problem[2::2]):
        result = (running + int(digit) * (1 if sign == "+" else -1)) % 10
        steps.append((f"{running}{sign}{digit}={result}\n", int(digit) in RISKY))
        running = result
    return steps + [(f"\\boxed{{{running}}}", False)]


def demonstrations(n, rng):
    """n problems with solutions as a careless author writes them, as token ids: (n, tokens)."""
    digits, minus = rng.integers(0, 10, (n, OPERATIONS + 1)), rng.integers(0, 2, (n, OPERATIONS))
    signs, zero = np.where(minus, ID["-"], ID["+"]), ID["0"]
    always = {symbol: np.full(n, number) for symbol, number in ID.items()}
    problem = [column for i in range(OPERATIONS) for column in (digits[:, i] + zero, signs[:, i])]
    solution, running = [], digits[:, 0]
    for i in range(OPERATIONS):
        operand = digits[:, i + 1]
        careless = np.isin(operand, RISKY) & (rng.random(n) < CARELESS)
        slip = careless & (rng.random(n) < SLIP)
        result = (running + np.where(minus[:, i], -operand, operand) + slip) % 10
        mark = np.where(careless, ID["?"], ID["="])
        solution += [running + zero, signs[:, i], operand + zero, mark, result + zero, always["\n"]]
        running = result
    columns = [*problem, digits[:, -1] + zero, always["="], *solution, always["\\boxed{"], running + zero, always["}"],
               always["<eos>"]]
    return np.stack(columns, axis=1)


def toy_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), "isolated")
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
                parameter.add_(x.T if tall else x, alpha=-group["lr"] * max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5)


def train_toy_policy(seed, batch=64, learnt=0.06, cool_down=100):
    """A small Llama model that imitates the careless author. It trains until its loss shows that it has learnt the sums
    (what is left, 0.032, is the author's carelessness), then cool_down steps more while the learning rate falls to 0."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from generate import progress_bar
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(SYMBOLS), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None, eos_token_id=ID["<eos>"], pad_token_id=ID["<pad>"], tie_word_embeddings=True))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = {Muon(matrices, lr=0.03): 0.03, torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0): 4e-3}
    rng, step, loss_so_far, steps_left = np.random.default_rng(seed), 0, 2.0, None
    with progress_bar(None, "making the toy's policy", "steps") as bar:
        while steps_left != 0:
            ids = torch.from_numpy(demonstrations(batch, rng))
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, PROMPT_TOKENS - 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT_TOKENS:].flatten())
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


def make_toy(run, seed, n_problems, n_test):
    """Write problems.jsonl, test.jsonl (no problem in both) and policy/ into a run."""
    run.mkdir(parents=True, exist_ok=True)
    rng, problems = random.Random(seed), {}
    while len(problems) < n_problems + n_test:
        text, answer = toy_problem(rng)
        problems[text] = answer
    rows = [{"id": f"toy-{i}", "problem": text, "answer": str(answer)} for i, (text, answer) in enumerate(problems.items())]
    for name, part in (("problems.jsonl", rows[:n_problems]), ("test.jsonl", rows[n_problems:])):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    policy = train_toy_policy(seed)
    policy.save_pretrained(run / "policy")
    toy_tokenizer().save_pretrained(run / "policy")


# ---------------------------------------------------------------------------------------------------------------------
# The toy: the truth

def truth_tree(problem):
    """All right ways to write a problem's solution, and a slip at every risky step of each: -> (nodes, tokens).

    nodes: [{"parent", "depth", "kind": "start", "right" (=), "careless" (? and right) or "slip"}, ...], tokens: ids.
    """
    tokenizer = toy_tokenizer()
    nodes, tokens, frontier = [{"parent": -1, "depth": 0, "kind": "start"}], [tokenizer(problem).input_ids], [0]
    for depth, (line, risky) in enumerate(right_steps(problem), 1):
        writings = [("right", line)]
        if risky:
            result = int(line[-2])
            writings += [("careless", line.replace("=", "?")), ("slip", line[:3] + f"?{(result + 1) % 10}\n")]
        last, parents, frontier = depth > OPERATIONS, frontier, []
        for parent, (kind, text) in itertools.product(parents, writings):
            if kind != "slip":
                frontier.append(len(nodes))
            nodes.append({"parent": parent, "depth": depth, "kind": kind})
            tokens.append(tokenizer(text).input_ids + [ID["<eos>"]] * last)
    return nodes, tokens


def true_values(policy_folder, problems):
    """The truth of states: V(s) = sum over right next steps of pi(a|s) V(s a), 0 after a slip, by the policy's own
    log-probs -> [(nodes, tokens, V, how likely the policy is to come to each node), ...]."""
    from transformers import AutoModelForCausalLM
    from train_actor import Policy, reference_logps
    from train_critic import Steps, load_model, pack
    with one_rank() as world:
        policy = load_model(AutoModelForCausalLM, policy_folder, world, wrap=Policy)
        trees, all_steps, first = [truth_tree(problem) for problem in problems], [], 0
        for problem, (nodes, tokens) in zip(problems, trees):
            all_steps.append(Steps(problem, first, [node["parent"] for node in nodes], tokens, list(range(1, len(nodes)))))
            first += len(nodes)
        logps = reference_logps(policy, pack(all_steps, 4096), first, world)
    result = []
    for steps, (nodes, tokens) in zip(all_steps, trees):
        p = np.exp(logps[steps.first:steps.first + len(nodes)].double().numpy())  # of each step, at its parent
        v, reach = np.zeros(len(nodes)), np.ones(len(nodes))
        for node in range(1, len(nodes)):
            reach[node] = reach[nodes[node]["parent"]] * p[node]
        for node in reversed(range(1, len(nodes))):
            if nodes[node]["depth"] == OPERATIONS + 1:
                v[node] = 1.0
            if nodes[node]["kind"] != "slip":
                v[nodes[node]["parent"]] += v[node] * p[node]
        result.append((nodes, tokens, v, reach))
    return result


def judge_critic(run, problems):
    """The critic on problems that nothing was trained on -> in how many risky states it values the right step (written
    with =) over the slip, and its correlation with the truth within problems (states weighed by how often the policy comes
    to them)."""
    from transformers import AutoModelForTokenClassification
    from train_critic import Steps, load_model, pack, predict
    truth = true_values(run / "policy", problems)
    with one_rank() as world:
        critic, all_steps, first = load_model(AutoModelForTokenClassification, run / "critic", world), [], 0
        for problem, (nodes, tokens, _, _) in zip(problems, truth):
            states = [i for i, node in enumerate(nodes) if node["depth"] <= OPERATIONS]
            all_steps.append(Steps(problem, first, [node["parent"] for node in nodes], tokens, states))
            first += len(nodes)
        values = predict(critic, pack(all_steps, 4096), first, world).numpy()
    above, columns = [], []
    for steps, (nodes, _, true, reach) in zip(all_steps, truth):
        v, states = values[steps.first:steps.first + len(nodes)], steps.wanted
        careful = [i for i in range(len(nodes)) if all(nodes[j]["kind"] in ("start", "right") for j in path_to(nodes, i))]
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
# The demo

def toy_commands(run, seed):
    """The five stages with the toy's own settings."""
    common, training = f"--run {run} --seed {seed}", "--max-tokens 1024 --no-recompute"
    return [f"generate.py {common} --solutions 4 --max-tokens 64",
            f"label.py {common} --select 2 --completions 4",
            f"train_critic.py {common} --critic {run}/policy --lr 3e-3 --batch 96 --epochs 4 {training}",
            f"train_actor.py {common} --beta 0.3 --lr 1e-4 --batch 192 --epochs 8 {training}",
            f"evaluate.py {common} --n 4 --max-tokens 64 --critic {run}/critic"]


def run_command(command):
    """Print a stage's command and run it as a user does; UserError if it fails."""
    print(f"\n$ OMP_NUM_THREADS=1 python {command}", flush=True)
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=HERE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise UserError(f"{command.split()[0]} ended with exit code {done.returncode}")


def demo(run, seed):
    """Make the toy, run the five stages, judge the critic."""
    started = time.time()
    if not (run / "policy").exists():
        make_toy(run, seed, n_problems=1024, n_test=512)
    for command in toy_commands(os.path.relpath(run, HERE), seed):
        begun = time.time()
        run_command(command)
        print(f"({time.time() - begun:.0f} s)", flush=True)
    problems = [json.loads(line)["problem"] for line in (run / "test.jsonl").read_text().splitlines()[:128]]
    marks = judge_critic(run, problems)
    print(f"\nThe critic on {marks['problems']} unseen problems: V(right) > V(slip) in {marks['V(right) > V(slip)']:.1%} of "
          f"{marks['risky states']} risky states, correlation with the truth within problems {marks['correlation']:.2f}.")
    print("\n" + (run / "report.md").read_text())
    print(f"{run / 'report.md'}, {run / 'report.png'}: the report and the picture ({time.time() - started:.0f} s in all)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=HERE / "runs" / "toy", help="the run folder (default: runs/toy)")
    parser.add_argument("--seed", type=int, default=0, help="of the toy, its policy and all stages (default: %(default)s)")
    args = parser.parse_args()
    demo(args.run, args.seed)


if __name__ == "__main__":
    run_stage(main)
