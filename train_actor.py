r"""DAPO, stage 4 of 5: advantages from the critic, then policy optimisation (Algorithm 1, steps B.1 and B.2).

    A(s, a_i) = Q(s, a_i) - mean_j Q(s, a_j),   Q(s, a) = V_phi(s a), or the reward if a ends the response    (Eq. 13)
    min_theta 1/2 E_{s,a} [ A(s, a) / beta - log pi_theta(a|s) / pi_ref(a|s) ]^2                              (Eq. 12)

The actions of s are the first steps of its completions. The loss asks for a log-ratio of A/beta: a *smaller* beta asks
for a *larger* move away from pi_ref. --advantage says where Q comes from, all else equal: the critic (above); "mc",
no critic, but the completions themselves; or "outcome", no steps at all: whole solutions are the actions of the prompt,
and Q is the reward. Each source passes the gap filter by its own advantages.

Three tricks, as in the paper: all actions of a state are in one batch; the mean runs over all samples, but each
distinct action is trained on once; only states with max A - min A >= --gap are trained on.

Reads:   RUN/trees.jsonl and, for the critic, RUN/values.safetensors; for "outcome" RUN/solutions.jsonl alone;
         the policy that was sampled from (pi_ref)
Writes:  RUN/ref_logps.safetensors  log pi_ref(a|s) of the trained nodes and of the drift's sample (NaN elsewhere)
         RUN/actor/                 the new policy, with tokenizer and generation config
         RUN/train_actor.json       the settings, the summary
         RUN/log.jsonl              a line a step, with stage "train_actor"

Departs from the paper: a batch takes whole rows of trees, as many as come closest to --batch pairs, so it holds fewer
problems than shuffled pairs would.

Laptop:  python train_actor.py --run runs/toy --beta 0.3 --lr 1e-4 --batch 96 --epochs 10 --max-tokens 1024 \
             --no-recompute
GPUs:    torchrun --nproc-per-node 8 -- train_actor.py --run runs/math
Interrupted? Run the same command again: it goes on from its last checkpoint, to the same weights.
"""
import argparse
import math
import random
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoModelForCausalLM

from generate import (UserError, add_run_flags, bounded, file_hash, find_model, finish_stage, load_tokenizer,
                      model_hash, print_complete, read_jsonl, run_stage, stage_record, start_stage)
from label import Tree, check_solutions
from train_critic import (Checkpoint, Log, Steps, World, add_training_flags, check_not_overwritten, check_trees, deal,
                          forward_row, imbalance, learning_rate, load_model, load_values, make_batches, make_optimizer,
                          optimizer_step, pack, quiet_libraries, read_trees, remove_checkpoints, save_model,
                          save_values, score_nodes, tokens_of_nodes, training_bill, training_settings)

CHUNK = 1024        # tokens whose logits exist at one time
DRIFT_STATES = 128  # filtered-out states on which the drift is measured ...
DRIFT_EVERY = 10    # ... every so many steps
NO_PAIRS = {"critic": "lower --gap, or look at the critic's summary in train_critic.json", "mc": "lower --gap",
            "outcome": "lower --gap, or sample more solutions: every problem's are all right or all wrong"}

# ---------------------------------------------------------------------------------------------------------------------
# Advantages and the loss


def action_values(tree, values):
    """{state: {action: Q(s, a)}}: actions are a state's children that were sampled there (count > 0).

    values: V_phi of every node of the tree, in order. Q of a step that ends the response is its known reward (Eq. 5
    with V = 0 after the end), which is 0 where the token limit cut it off.
    """
    q = {}
    for node, fields in enumerate(tree["nodes"]):
        if fields.get("count", 0) > 0:
            q.setdefault(fields["parent"], {})[node] = float(fields.get("reward", values[node]))
    return q


def state_advantages(tree, values):
    """{state: {action: A(s, a)}}, Eq. 13. The mean weighs each distinct action by how often it was sampled. Actions
    that the token limit cut off count in the mean, and are left out of the result: they are not trained on."""
    nodes, result = tree["nodes"], {}
    for state, q in action_values(tree, values).items():
        samples = sum(nodes[action]["count"] for action in q)
        mean = sum(nodes[action]["count"] * value for action, value in q.items()) / samples
        result[state] = {action: value - mean for action, value in q.items() if not nodes[action].get("cut")}
    return result


def advantages(tree, values):
    """A(s, a) of every action of the tree that can be trained on: {node of a: advantage} (Eq. 13).

    values: V_phi of every node of the tree, in order.
    """
    return {node: advantage for of_state in state_advantages(tree, values).values()
            for node, advantage in of_state.items()}


def monte_carlo(tree):
    """Q(s, a) of a tree's actions from completions alone, NaN where there are none: the share of those through the
    action that ended right, both those sampled at s that begin with a and, where s a was completed, those sampled
    there."""
    hits = [node["hits"] + node.get("value", 0) * node.get("n", 0) for node in tree["nodes"]]
    counts = [node["count"] + node.get("n", 0) for node in tree["nodes"]]
    return [right / count if count else math.nan for right, count in zip(hits, counts)]


def gap(of_state):
    """max A - min A over a state's distinct actions; 0 for fewer than two. (Rounded: 0.6 - 0.5 is 0.1.)"""
    return round(max(of_state.values()) - min(of_state.values()), 9) if of_state else 0.0


def dapo_loss(log_ratio, advantage, beta):
    """1/2 (A/beta - log pi_theta(a|s)/pi_ref(a|s))^2, one loss a pair (Eq. 12): (P,), (P,), float -> (P,)."""
    return 0.5 * (advantage / beta - log_ratio) ** 2


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs

class Policy(torch.nn.Module):
    """A causal language model that is called with a Row and returns log pi(a|s) of its scored nodes.

    Logits at one token predict the next one. A step's first token is predicted from its parent's last token, wherever
    in the row that stands; for steps b and c of one state a (tokens a1 a2, b1 b2, c1):

        token          a1  a2  b1  b2  c1
        predicted from  .  a1  a2  b1  a2          log pi(b|a) = log p(b1|a2) + log p(b2|b1)
    """

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, row, device):
        """-> (S,) float32: the sum over each scored node's tokens of their log-probs, not normalised by length."""
        hidden = forward_row(self.lm.get_decoder(), row, device).last_hidden_state[0]  # (T, hidden)
        begin, end, before = (torch.from_numpy(x).to(device) for x in (row.begin, row.end, row.before))
        length = end - begin
        owner = torch.repeat_interleave(torch.arange(len(length), device=device), length)  # (N,) of N scored tokens
        first = (length.cumsum(0) - length)[owner]
        target = torch.arange(len(owner), device=device) - first + begin[owner]            # (N,)
        source = torch.where(target == begin[owner], before[owner], target - 1)            # (N,)
        tokens, hidden = torch.from_numpy(row.tokens).long().to(device)[target], hidden[source]
        # The logits of all tokens never exist together: in the backward pass they are computed again, a chunk at a
        # time. It begins with the last chunk, whose logits can stay.
        rest = max(len(tokens) - CHUNK, 0)
        chunks = zip(hidden[:rest].split(CHUNK), tokens[:rest].split(CHUNK))
        logps = [recompute(self.token_logps, *chunk, use_reentrant=False) for chunk in chunks if rest]
        logps.append(self.token_logps(hidden[rest:], tokens[rest:]))
        return torch.zeros(len(length), device=device).index_add(0, owner, torch.cat(logps))

    def token_logps(self, hidden, tokens):
        """log p(token) from the hidden state before it: (N, hidden), (N,) -> (N,)."""
        logits = self.lm.get_output_embeddings()(hidden).float()  # (N, V)
        return -F.cross_entropy(logits, tokens, reduction="none")


def node_logps(policy, groups, n_nodes, world, title=None):
    """log pi(a|s) of all scored nodes of the rows, as score_nodes gives them."""
    return score_nodes(lambda row: policy(row, world.device), groups, n_nodes, world, title)


# ---------------------------------------------------------------------------------------------------------------------
# Data

def read_pairs(run, source, tokenizer, values=None):
    """Yield (tree, number of its first node, V of its nodes) as --advantage `source` asks for.

    values: the critic's, of all nodes. "outcome" needs none: every action of its trees ends the response.
    """
    if source == "outcome":
        first = 0
        for _, row in read_jsonl(run / "solutions.jsonl"):
            # no state beside the root: the whole response is one step
            tree = Tree(row, tokenizer, len(row["solutions"]), seed=0, max_states=0).record()
            yield tree, first, [math.nan] * len(tree["nodes"])
            first += len(tree["nodes"])
    else:
        for tree, first in read_trees(run / "trees.jsonl"):
            yield tree, first, (values[first:first + len(tree["nodes"])].tolist() if source == "critic"
                                else monte_carlo(tree))


def choose_pairs(trees, min_gap, seed):
    """Advantages and the gap filter over all trees, as read_pairs yields them -> (to train: list of Steps, drift: list
    of Steps, targets: (nodes,) advantages of the trained nodes, NaN elsewhere, counts for the summary)."""
    advantage, train, filtered = [], [], []
    n = dict.fromkeys(("problems", "states", "states trained on", "pairs trained on", "actions cut off, not trained on",
                       "actions that end the response, beside others that do not", "their advantage above 0"), 0)
    for tree, first, values in trees:
        nodes, wanted = tree["nodes"], []
        of_states = state_advantages(tree, values)
        advantage += [math.nan] * len(nodes)
        n["problems"] += 1
        n["states"] += len(of_states)
        n["actions cut off, not trained on"] += sum(bool(node.get("cut") and node["count"]) for node in nodes)
        steps = Steps(tree["id"], first, [node["parent"] for node in nodes], [node["ids"] for node in nodes], wanted)
        for of_state in filter(None, of_states.values()):  # empty where all actions were cut off
            if gap(of_state) < min_gap:
                filtered.append((steps, list(of_state)))
                continue
            wanted += of_state
            n["states trained on"] += 1
            early = [action for action in of_state if "reward" in nodes[action]]
            if len(early) < len(of_state):
                n["actions that end the response, beside others that do not"] += len(early)
                n["their advantage above 0"] += sum(of_state[action] > 0 for action in early)
            for action, value in of_state.items():
                advantage[first + action] = value
        n["pairs trained on"] += len(wanted)
        if wanted:
            train.append(steps)
    sample = random.Random(seed).sample(filtered, min(DRIFT_STATES, len(filtered)))
    drift = [Steps(steps.name, steps.first, steps.parents, steps.tokens, actions) for steps, actions in sample]
    return train, drift, torch.tensor(advantage), n


# ---------------------------------------------------------------------------------------------------------------------
# Diagnostics

def diagnostics(log_ratio, target, loss):
    """Sums over pairs from which step_line makes a step's numbers: (P,), (P,) of A/beta, (P,) -> (10,) float64."""
    x, y = target.double(), log_ratio.double()
    good, bad = x > 0, x < 0
    return torch.stack([loss.double().sum(), y.abs().sum(), ((x * y) > 0).sum(), (x != 0).sum(), (x * y).sum(),
                        (x * x).sum(), y[good].sum(), good.sum(), y[bad].sum(), bad.sum()])


def step_line(sums, count):
    """The numbers of one optimiser step. slope: of log ratio on A/beta, 1 at the minimum of Eq. 12."""
    loss, size, agree, signed, xy, xx, good, n_good, bad, n_bad = sums
    return {"loss": loss / count, "abs_log_ratio": size / count, "slope": xy / max(xx, 1e-12),
            "sign_agreement": agree / max(signed, 1), "log_ratio_good": good / max(n_good, 1),
            "log_ratio_bad": bad / max(n_bad, 1)}


@torch.no_grad()
def mean_drift(policy, groups, ref, world):
    """Mean |log pi_theta/pi_ref| on the actions of the sample of filtered-out states, which nothing holds in place."""
    total = count = 0.0
    for row, weight in deal([row for group in groups for row in group], world.size)[world.rank]:
        log_ratio = policy(row, world.device) - ref[torch.from_numpy(row.nodes)].to(world.device)
        total, count = total + weight * log_ratio.abs().sum().item(), count + weight * len(row.nodes)
    total, count = world.sum(total, count)
    return total / count


def converged(history, window):
    """Whether the mean |log ratio| of the last two windows of steps differs by less than 1% (our form of the authors'
    stopping rule)."""
    if not window or len(history) < 2 * window:
        return False
    before, last = sum(history[-2 * window:-window]), sum(history[-window:])
    return abs(last - before) < 0.01 * before


# ---------------------------------------------------------------------------------------------------------------------
# The stage

def train(args, world, folder, values, made_from):
    """Optimise Eq. 12 and save RUN/actor -> the summary."""
    steps, drift, advantage, counts = choose_pairs(
        read_pairs(args.run, args.advantage, load_tokenizer(folder), values), args.gap, args.seed)
    if not steps:
        raise UserError(f"{args.run}: no state has max A - min A >= {args.gap}: {NO_PAIRS[args.advantage]}")
    groups, drift_groups = pack(steps, args.max_tokens, args.batch), pack(drift, args.max_tokens)
    sizes = [sum(len(row.nodes) for row in group) for group in groups]
    batches = make_batches(sizes, args.batch, args.epochs, args.seed)
    policy = load_model(AutoModelForCausalLM, folder, world, args.recompute, wrap=Policy)
    ref_path = args.run / "ref_logps.safetensors"
    if not ref_path.exists():
        # from the very rows and weights that training starts with, so that every log ratio starts at 0
        ref = node_logps(policy, groups + drift_groups, len(advantage), world, "log pi_ref of every pair")
        if world.rank == 0:
            save_values(ref_path, ref, "log_probs", **made_from)
    dist.barrier()
    ref = load_values(ref_path, "log_probs", **made_from)
    optimizer = make_optimizer(policy)
    checkpoint = Checkpoint(args.run / "actor", policy, optimizer, world)
    done = checkpoint.load()
    log = Log(args.run, "train_actor", len(batches), done, world)
    if world.rank == 0:
        print(f"{counts['pairs trained on']:,} pairs of {counts['states trained on']:,} states (of "
              f"{counts['states']:,}) in {sum(map(len, groups)):,} rows, {len(batches):,} steps", flush=True)
    history = [line["abs_log_ratio"] for line in log.lines()]
    for step in range(done, len(batches)):
        started = time.time()
        rows = [row for group in batches[step] for row in groups[group]]
        count, tokens = (sum(len(getattr(row, part)) for row in rows) for part in ("nodes", "tokens"))
        sums = torch.zeros(10, dtype=torch.float64, device=world.device)

        def row_loss(row, weight):
            nodes = torch.from_numpy(row.nodes)
            target = advantage[nodes].to(world.device)
            log_ratio = policy(row, world.device) - ref[nodes].to(world.device)
            losses = dapo_loss(log_ratio, target, args.beta)
            sums.add_(weight * diagnostics(log_ratio.detach(), target / args.beta, losses.detach()))
            return losses.sum() / count

        lr = learning_rate(step, len(batches), args.lr)
        norm = optimizer_step(policy, optimizer, rows, row_loss, lr, args.clip, world)
        rate = tokens / (time.time() - started)
        line = step_line(world.sum(*sums.tolist()), count)
        history.append(line["abs_log_ratio"])
        stop = step + 1 == len(batches) or converged(history, args.stop_window)
        if drift_groups and ((step + 1) % DRIFT_EVERY == 0 or stop):
            line["drift"] = mean_drift(policy, drift_groups, ref, world)
        log.write(step + 1, **line, grad_norm=norm, lr=lr, pairs=count, tokens=tokens,
                  imbalance=imbalance(rows, world.size), tokens_per_s=rate)
        if stop:
            break
        if (step + 1) % args.save_every == 0:
            checkpoint.save(step + 1)
    log.bar.close()
    save_model(policy.lm, AutoModelForCausalLM, args.run / "actor", args.save_dtype, folder, world)
    return {**counts, "steps": step + 1, **line,
            **training_bill(args.run, "train_actor", "pairs", steps, groups + drift_groups, args.run / "actor"),
            "tokens scored, a row each": tokens_of_nodes(steps)}


def check_data(args):
    """-> (the hashes of the data and of the policy that it was sampled from, that policy's folder)."""
    folder = find_model(stage_record(args.run, "generate")["model"])
    if args.advantage == "outcome":
        solutions, policy = check_solutions(args.run, folder)
        return {"solutions": solutions, "policy": policy}, folder
    trees, policy = check_trees(args.run)
    if model_hash(folder) != policy:
        raise UserError(f"{folder}: not the policy that the trees were sampled from: its weights have changed")
    return {"trees": trees, "policy": policy}, folder


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_flags(parser)
    method = parser.add_argument_group("method")
    method.add_argument("--advantage", choices=["critic", "mc", "outcome"], default="critic", help="where Q comes "
                        "from: the critic, the completions, or the rewards of whole solutions (default: %(default)s)")
    method.add_argument("--beta", type=bounded(float), default=0.01, help="weight of KL(pi || pi_ref): the target "
                        "log-ratio is A/beta, so a smaller beta asks for a larger move (paper: 0.01 or 0.02; "
                        "default: %(default)s)")
    method.add_argument("--gap", type=float, default=0.1, help="least max A - min A of a state to be trained on "
                        "(paper: %(default)s)")
    method.add_argument("--stop-window", type=int, default=0, metavar="W", help="stop when the mean |log ratio| of two "
                        "successive windows of W steps differs by less than 1%% (default: off)")
    add_training_flags(parser, batch=2048, unit="(state, action) pairs", lr=5e-7)
    return parser.parse_args()


def main():
    args = parse_args()
    quiet_libraries()
    made_from, folder = check_data(args)
    check_not_overwritten(folder, args.run / "actor")
    inputs, values = dict(made_from), None
    if args.advantage == "critic":
        values = load_values(args.run / "values.safetensors", **made_from)
        inputs["values"] = file_hash(args.run / "values.safetensors")
    world, summary, outputs = World(), None, [args.run / "actor", args.run / "ref_logps.safetensors"]
    if world.rank == 0:
        settings = training_settings(args, "advantage", "beta", "gap", "stop_window")
        summary = start_stage(args.run, "train_actor", settings, inputs, outputs, args.overwrite)
    if summary := world.share(summary):
        remove_checkpoints(args.run / "actor")
        return world.rank > 0 or print_complete("train_actor", summary)
    summary = train(args, world, folder, values, made_from)
    if world.rank == 0:
        finish_stage(args.run, "train_actor", {**summary, "actor": model_hash(args.run / "actor")})
        remove_checkpoints(args.run / "actor")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_stage(main)
