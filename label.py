r"""DAPO, stage 2 of 5: split solutions into steps, complete every state, label it with its Monte-Carlo
value (step A.2).

A step is the text up to and including a line break (or another --delimiter); a state s_t is the prompt and the first t
steps of a solution. From every state of the selected solutions the policy samples N completions, and

    MC_N(s) = 1/N sum_i r(x, completion_i)   estimates   V(s) = P(pi_ref, continuing from s, ends right).   (Eq. 3)

The completions' first steps are also the actions on which the actor will be trained: sampled from pi_ref at s, they
cost nothing more. The selected solutions and all first steps of a problem make one tree, in which equal prefixes are
one node.

Reads:   RUN/solutions.jsonl, the policy that sampled them
Writes:  RUN/completions.jsonl  one state a line: id, state (its node), completions (ids, reward, finish)
         RUN/trees.jsonl        one problem a line: id, problem, answer, prompt, nodes (class Tree)
         RUN/label.json         the settings, the hashes of what was read, the summary

Departs from the paper: the root needs no completions, since all N solutions of the problem were sampled there; equal
states of several solutions are completed once; a completion gets the token limit minus the tokens of its state's steps.

Laptop:  python label.py --run runs/toy --select 2 --completions 4
GPUs:    torchrun --nproc-per-node 8 -- label.py --run runs/math
Interrupted? Run the same command again: it goes on with the states that are missing.
"""
import argparse
import functools
import json
import math
import random

from generate import (Request, Team, UserError, add_engine_flags, add_run_flags, bill, bounded, cache_block, decode,
                      file_hash, find_model, finish_stage, load_tokenizer, model_hash, print_complete, read_jsonl,
                      run_stage, sample_stage, stage_record, start_stage, whole_file)

# ---------------------------------------------------------------------------------------------------------------------
# Steps: cut out of the sampled token ids, never tokenised again


@functools.cache
def text_of(tokenizer, *tokens):
    """The tokens' text within a response. (Some tokenizers strip a text's first blank.)"""
    once, twice = (tokenizer.decode(tokens * n, clean_up_tokenization_spaces=False) for n in (1, 2))
    return twice[len(once):]


def split_steps(tokenizer, ids, delimiter="\n", pieces=1):
    r"""Cut a response's token ids into steps: list[int] -> yields list[int], which join to ids.

    A piece ends with the token that completes its first delimiter; what follows the last such token (often the
    end-of-text id) is a piece too, and a step is `pieces` of them. A delimiter of blanks alone does not count before
    the piece's first other character: so blank lines open the next step. No step is a prefix of another one, which
    makes the pi(a|s) of all actions sum to 1. With one token a word:

        "\n"  "a"  "=1"  "\n"  "\n"  "b"  ".\n\n"  "<eos>"   ->   ["\n" "a" "=1" "\n"]  ["\n" "b" ".\n\n"]  ["<eos>"]
    """
    first = torn = found = 0  # where the step begins, and a character that is not whole yet; pieces in the step
    text, blank = "", delimiter.isspace()
    for end in range(1, len(ids) + 1):
        piece = text + text_of(tokenizer, *ids[torn:end])
        if not piece.endswith("\ufffd"):
            text, torn = piece, end
        if delimiter in (piece.lstrip() if blank else piece):
            text, torn, found = "", end, found + 1
            if found == pieces:
                yield ids[first:end]
                first, found = end, 0
    if first < len(ids):
        yield ids[first:]


def step_text(tokenizer, before, step, last):
    """The text of a step that follows the step `before` ([] at the start of the response).

    A character whose bytes are spread over two steps belongs to the second, so that the steps' texts join to the
    response's text exactly. (Decoded after the step before it, since some tokenizers strip a text's first blank.)
    """
    head, text = decode(tokenizer, before), decode(tokenizer, before + step)
    if not last:
        text = text.rstrip("\ufffd")
    return text[len(head.rstrip("\ufffd")):]


# ---------------------------------------------------------------------------------------------------------------------
# Trees

def select(solutions, k, rng):
    """Choose k solutions, half of them right and half wrong; if one kind is short, the other fills up."""
    right = [solution for solution in solutions if solution["reward"] == 1.0]
    wrong = [solution for solution in solutions if solution["reward"] != 1.0]
    n_right = min(len(right), k // 2)
    n_wrong = min(len(wrong), k - n_right)
    n_right = min(len(right), k - n_wrong)
    return rng.sample(right, n_right) + rng.sample(wrong, n_wrong)


class Tree:
    """The selected solutions of a problem, the first steps of all its solutions, and those of the completions of every
    state. nodes[0] is the prompt, the state s_0; every other node is a step, and the state after it.

    A node: parent (before it in the list), text, ids (the step's own token ids), visits (selected solutions that pass
    here), count (completions sampled at the parent that begin with this step), hits (those of them that ended right);
    on completed states value and n, the Monte-Carlo mean and its sample size; on steps that end the response reward
    (and cut: true where the token limit ended it).
    """

    def __init__(self, row, tokenizer, n_selected, seed, delimiter="\n", max_states=math.inf):
        """Select n_selected solutions, and lay them out in steps of as many pieces (split_steps) as it takes for none
        to have more than max_states states beside the root. The steps of completions are as long."""
        self.head = {name: row[name] for name in ("id", "problem", "answer", "prompt")}
        self.tokenizer = tokenizer
        selected = select(row["solutions"], n_selected, random.Random(f"{seed}/{row['id']}"))
        self.split = functools.partial(split_steps, tokenizer, delimiter=delimiter)
        if max_states < math.inf:
            longest = max(len(list(self.split(solution["ids"]))) for solution in selected)
            self.split = functools.partial(self.split, pieces=math.ceil(longest / (max_states + 1)))
        self.nodes = [{"parent": -1, "text": "", "ids": row["prompt_ids"], "visits": 0, "count": 0, "hits": 0}]
        self.node_of = {}  # (parent, step's ids) -> node
        for solution in selected:
            self.visit(solution)
        self.states = [node for node in range(1, len(self.nodes)) if "reward" not in self.nodes[node]]
        self.complete(0, row["solutions"])

    def visit(self, solution):
        """Walk a whole solution from the root -> its last node."""
        node, steps = 0, list(self.split(solution["ids"]))
        self.nodes[0]["visits"] += 1
        for i, step in enumerate(steps):
            node = self.step(node, step, solution if i == len(steps) - 1 else None)
            self.nodes[node]["visits"] += 1
        return node

    def step(self, parent, ids, ending):
        """The child of parent by this step. ending: the sampled response that ends with it, or None."""
        node = self.node_of.setdefault((parent, tuple(ids)), len(self.nodes))
        if node == len(self.nodes):
            before = self.nodes[parent]["ids"] if parent else []
            text = step_text(self.tokenizer, before, ids, last=ending is not None)
            self.nodes.append({"parent": parent, "text": text, "ids": ids, "visits": 0, "count": 0, "hits": 0})
            if ending is not None:
                self.nodes[node]["reward"] = ending["reward"]
                if ending["finish"] == "length":
                    self.nodes[node]["cut"] = True
        return node

    def complete(self, state, completions):
        """Label a state with the mean reward of its completions, and add their first steps as its actions."""
        for completion in completions:
            first = next(self.split(completion["ids"]))
            node = self.step(state, first, completion if len(first) == len(completion["ids"]) else None)
            self.nodes[node]["count"] += 1
            self.nodes[node]["hits"] += int(completion["reward"])
        hits = sum(completion["reward"] for completion in completions)
        self.nodes[state].update(value=hits / len(completions), n=len(completions))

    def steps_to(self, node):
        """The token ids of the steps from the prompt to a node."""
        ids = []
        while node:
            ids = self.nodes[node]["ids"] + ids
            node = self.nodes[node]["parent"]
        return ids

    def record(self):
        """This tree's line of trees.jsonl."""
        return {**self.head, "nodes": self.nodes}

    def requests(self, settings):
        """The completions to sample, in tree order."""
        for state in self.states:
            steps, name = self.steps_to(state), self.head["id"]
            yield Request(f"label/{name}/{state}", {"id": name, "state": state}, self.head, self.nodes[0]["ids"], steps,
                          settings["completions"], settings["max_tokens"] - len(steps),
                          settings["temperature"], settings["top_p"], settings["seed"])


def mean_rest(tree):
    """{state: mean number of tokens that the selected solutions through it still had to go}, the root included."""
    total, count = [0] * len(tree.nodes), [0] * len(tree.nodes)
    for node in reversed(range(1, len(tree.nodes))):
        parent, visits = tree.nodes[node]["parent"], tree.nodes[node]["visits"]
        total[parent] += total[node] + visits * len(tree.nodes[node]["ids"])
        count[parent] += visits
    return {state: total[state] / count[state] for state in [0, *tree.states]}


# ---------------------------------------------------------------------------------------------------------------------
# The stage

def forecast(trees, n):
    """About how many tokens n completions a state will take: {what: tokens}, here and if every state of every selected
    solution were completed, each from a prompt of its own (the paper's way)."""
    tokens = dict.fromkeys(("sampled", "prompt", "sampled, every state", "prompt, every state"), 0)
    block = cache_block()
    for tree in trees:
        path, shared = {0: len(tree.nodes[0]["ids"])}, {0: 0}  # in tokens; shared: with states before this one
        for state, rest in mean_rest(tree).items():
            node = tree.nodes[state]
            if state > 0:
                path[state] = path[node["parent"]] + len(node["ids"])
                shared[state] = path[node["parent"]] if len(path) > 2 else 0
                # whole blocks are found in the cache, but the last token is always computed
                first, others = (path[state] - min(known, path[state] - 1) // block * block
                                 for known in (shared[state], path[state]))
                tokens["sampled"] += n * rest
                tokens["prompt"] += first + (n - 1) * others
            tokens["sampled, every state"] += n * rest * node["visits"]
            tokens["prompt, every state"] += path[state] * node["visits"]
    return tokens


def check_solutions(run, folder):
    """Hold solutions.jsonl and the policy's folder against generate.json -> their hashes."""
    path, generate = run / "solutions.jsonl", stage_record(run, "generate")
    if "summary" not in generate or not path.exists():
        raise UserError(f"{path}: not complete: run generate.py with the same --run again")
    if file_hash(path) != generate.get("solutions"):
        raise UserError(f"{path}: not the file that generate.py wrote: restore it, or run generate.py with --overwrite")
    if model_hash(folder) != generate["inputs"]["policy"]:
        raise UserError(f"{folder}: not the policy that sampled {path}: its weights have changed")
    return generate["solutions"], generate["inputs"]["policy"]


def write_trees(trees, completions, target):
    """Join the trees and their completions into trees.jsonl -> counts for the summary."""
    lines = (line for _, line in read_jsonl(completions))
    nodes = values = cut = 0
    with whole_file(target) as file:
        for tree in trees:
            for state in tree.states:
                sampled = next(lines)["completions"]
                tree.complete(state, sampled)
                cut += sum(completion["finish"] == "length" for completion in sampled)
            nodes += len(tree.nodes)
            values += sum(tree.nodes[state]["value"] for state in [0, *tree.states])
            file.write(json.dumps(tree.record(), ensure_ascii=False) + "\n")
            tree.nodes = tree.node_of = None  # only one complete tree is in memory at a time
    labels = len(trees) + sum(len(tree.states) for tree in trees)
    return {"states labelled": labels, "nodes": nodes, "mean Monte-Carlo value": values / labels,
            "completions cut off at the token limit": cut}


def unescaped(text):
    """The delimiter of the command line: \\n is a line break."""
    delimiter = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    if not delimiter:
        raise argparse.ArgumentTypeError("must not be empty")
    return delimiter


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_flags(parser)
    parser.add_argument("--select", type=bounded(int), default=6,
                        help="solutions a problem to label (default, as in the paper: %(default)s)")
    parser.add_argument("--completions", type=bounded(int), default=16,
                        help="completions a state, N and M (default, as in the paper: %(default)s)")
    parser.add_argument("--delimiter", type=unescaped, default="\n", help=r"text that ends a step, with \n, \t and the "
                        r"like as in Python: \n\n for paragraphs, . for sentences (default, as in the paper: \n)")
    parser.add_argument("--max-states", type=bounded(int), metavar="K", help="complete at most K states of a "
                        "solution: a problem's steps are made of as many pieces as it takes (default: no limit)")
    add_engine_flags(parser)
    return parser.parse_args()


def main():
    args = parse_args()
    team = Team(args.tensor_parallel)
    generate = stage_record(args.run, "generate")
    folder = find_model(generate["model"])
    output, completions, summary = args.run / "trees.jsonl", args.run / "completions.jsonl", None
    settings = {name: getattr(args, name) for name in ("select", "completions", "delimiter", "max_states", "seed")}
    if team.rank == 0:
        solutions_hash, policy_hash = check_solutions(args.run, folder)
        inputs = {"solutions.jsonl": solutions_hash, "policy": policy_hash}
        summary = start_stage(args.run, "label", settings, inputs, [output, completions], args.overwrite)
    if summary := team.share("summary", summary):
        return team.rank > 0 or print_complete("label", summary)

    tokenizer = load_tokenizer(folder)
    trees = [Tree(row, tokenizer, args.select, args.seed, args.delimiter, args.max_states or math.inf)
             for _, row in read_jsonl(args.run / "solutions.jsonl")]
    limits = {name: generate["settings"][name] for name in ("max_tokens", "temperature", "top_p")}
    requests = [request for tree in trees for request in tree.requests({**settings, **limits})]
    if not requests:
        raise UserError(f"{args.run / 'solutions.jsonl'}: no selected solution has a second step: does --delimiter "
                        f"{args.delimiter!r} end the steps?")
    expected = forecast(trees, args.completions)
    if team.rank == 0:
        print(f"to sample in all: {len(requests):,} states x {args.completions} completions, about "
              f"{expected['sampled']:,.0f} tokens, and to compute about {expected['prompt']:,} prompt tokens",
              flush=True)
    sample_stage("label", [(folder, requests)], completions, ["id", "state"], "completions", args, team,
                 keep=("ids", "reward", "finish"))
    if team.rank == 0:
        on_paths = sum(tree.nodes[state]["visits"] for tree in trees for state in [0, *tree.states])
        counts, took = write_trees(trees, completions, output), bill(args.run, "label")
        errors = [f"{took[what] / max(expected[name], 1) - 1:+.1%}"
                  for what, name in (("tokens sampled", "sampled"), ("prompt tokens computed", "prompt"))]
        finish_stage(args.run, "label", {
            "problems": len(trees), "states on the selected solutions": on_paths, "states completed": len(requests),
            **counts, **took, "against the forecast": f"sampled {errors[0]}, prompt tokens computed {errors[1]}"},
            trees=file_hash(output), forecast=expected)


if __name__ == "__main__":
    run_stage(main)
