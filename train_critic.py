r"""DAPO, stage 3 of 5: fit the critic to the Monte-Carlo values, then score every node of every tree (step A.3).

    min_phi E_s BCE(MC_N(s), V_phi(s)),   V_phi(s) = sigmoid(head(hidden state at the last token of s))   (Eq. 15)

The labels are soft. The critic is trained first and apart from the actor: its targets are fixed, so nothing chases
anything. A tree is one row of tokens (see pack()): every prefix goes through the model once, forward and backward.

Reads:   RUN/trees.jsonl, the tokenizer of the policy that was sampled from
Writes:  RUN/critic/             an AutoModelForTokenClassification with one label, and its tokenizer
         RUN/values.safetensors  V_phi of every node of every tree, in the file's order
         RUN/train_critic.json   the settings, the summary, the calibration table of the held-out problems
         RUN/log.jsonl           a line a step, with stage "train_critic"

Departs from the paper: a batch takes whole rows of trees, as many as come closest to --batch states; 5% of the problems
are held out.

Laptop:  python train_critic.py --run runs/toy --critic runs/toy/policy --lr 3e-3 --batch 144 --epochs 5 \
             --max-tokens 1024 --no-recompute
GPUs:    torchrun --nproc-per-node 8 -- train_critic.py --run runs/math
Interrupted? Run the same command again: it goes on from its last checkpoint, to the same weights.
"""
import argparse
import hashlib
import json
import math
import os
import random
import shutil
import time
import warnings
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForTokenClassification

from generate import (UserError, add_run_flags, bounded, cut_log, die_with_launcher, file_hash, find_model,
                      finish_stage, load_tokenizer, model_hash, model_size, print_complete, progress_bar, read_jsonl,
                      read_log, render_prompt, run_stage, stage_record, start_stage)

PAD_TO = 128  # rows are padded to a multiple of this many tokens: the block size of the attention

# ---------------------------------------------------------------------------------------------------------------------
# Packing: a tree is one row


@dataclass
class Steps:
    """What packing needs of a tree. Nodes are numbered through the whole file; this tree's are first, first + 1, ..."""
    name: str                # the problem's id, for messages
    first: int
    parents: list[int]       # parents[node] < node; -1 for the root
    tokens: list[list[int]]  # each node's own tokens
    wanted: list[int]        # the nodes of which a log-prob or a value is needed

    def __post_init__(self):
        self.tokens = [array("i", ids) for ids in self.tokens]  # a fifth of the lists' memory


@dataclass
class Row:
    """Trees (or a part of one) in one row of T tokens; S of its nodes are scored here.

    A token sees those before it in its own node and in the node's ancestors: k <= q and enter[k] <= enter[q] < exit[k],
    with the nodes' times of entry and exit in a depth-first walk. Padding is a node of its own.
    """
    tokens: np.ndarray     # (T,)
    positions: np.ndarray  # (T,) counted along the path from the root
    enter: np.ndarray      # (T,)
    exit: np.ndarray       # (T,)
    nodes: np.ndarray      # (S,) numbers of the scored nodes
    begin: np.ndarray      # (S,) where a node's tokens begin in the row
    end: np.ndarray        # (S,) and end (exclusive)
    before: np.ndarray     # (S,) where its parent's last token stands, from which its first token is predicted

    def last(self):
        """Where each scored node's last token stands (its parent's, should the node have none): (S,)."""
        return np.where(self.end > self.begin, self.end - 1, self.before)


def cut(steps, max_tokens):
    """Cut a tree into parts of at most max_tokens tokens -> [([node, ...] depth first, {scored nodes}), ...].

    Only wanted nodes and their ancestors are laid out. A part that does not begin at the root repeats the path to its
    first node, and nothing else; every wanted node is scored in one part.
    """
    needed, children = set(), {}
    for node in steps.wanted:
        while node >= 0 and node not in needed:
            needed.add(node)
            node = steps.parents[node]
    for node in sorted(needed):
        children.setdefault(steps.parents[node], []).append(node)
    wanted, parts, part, scored, size = set(steps.wanted), [], [], set(), 0
    walk = list(children.get(-1, []))
    while walk:
        node = walk.pop()
        walk += reversed(children.get(node, []))
        if part and size + len(steps.tokens[node]) > max_tokens:
            parts.append((part, scored))
            path = ancestors(steps.parents, node)
            part, scored, size = path, set(), sum(len(steps.tokens[ancestor]) for ancestor in path)
        part.append(node)
        scored |= {node} & wanted
        size += len(steps.tokens[node])
        if size > max_tokens:
            raise UserError(f"problem {steps.name}: a path of {size:,} tokens: use --max-tokens {size} or more")
    return parts + [(part, scored)] if part else parts


def ancestors(parents, node):
    """The path from the root to a node, without the node."""
    path = []
    while (node := parents[node]) >= 0:
        path.append(node)
    return path[::-1]


def lay_out(parts):
    """Put parts, [(steps, nodes depth first, scored nodes), ...], into one Row."""
    tokens, positions, enter, exit_, scores, clock = [], [], [], [], [], 0
    for steps, nodes, scored in parts:
        size = dict.fromkeys(nodes, 1)  # of the subtree
        for node in reversed(nodes[1:]):
            size[steps.parents[node]] += size[node]
        # of each node: where its last token stands, and how long the path to its end is
        last, depth = {-1: -1}, {-1: 0}
        for node in nodes:
            begin, parent, length = len(tokens), steps.parents[node], len(steps.tokens[node])
            tokens += steps.tokens[node]
            positions += range(depth[parent], depth[parent] + length)
            enter += [clock] * length
            exit_ += [clock + size[node]] * length
            clock += 1
            last[node] = len(tokens) - 1 if length else last[parent]
            depth[node] = depth[parent] + length
            if node in scored:
                scores.append((steps.first + node, begin, len(tokens), last[parent]))
    padding = -len(tokens) % PAD_TO
    columns = (tokens + [0] * padding, positions + [0] * padding,
               enter + [clock] * padding, exit_ + [clock + 1] * padding)
    return Row(*(np.array(column, dtype=np.int32) for column in columns),
               *np.array(scores, dtype=np.int64).reshape(-1, 4).T)


def pack(trees, max_tokens, max_nodes=math.inf):
    """Pack trees into rows of at most max_tokens tokens (padding aside) -> groups of rows: list[list[Row]].

    Small trees share a row, until it has max_nodes scored nodes, so that a row need not be larger than a batch; a tree
    that outgrows a row is cut over the rows of one group. An optimiser step takes whole groups, so that all actions of
    a state are in the same batch.
    """
    groups, open_parts, used, nodes = [], [], 0, 0
    for steps in trees:
        parts = [(steps, *part) for part in cut(steps, max_tokens)]
        if len(parts) > 1:
            groups.append([lay_out([part]) for part in parts])
            continue
        size = sum(len(steps.tokens[node]) for _, walk, _ in parts for node in walk)
        if open_parts and (used + size > max_tokens or nodes + len(steps.wanted) > max_nodes):
            groups.append([lay_out(open_parts)])
            open_parts, used, nodes = [], 0, 0
        open_parts, used, nodes = open_parts + parts, used + size, nodes + len(steps.wanted)
    return groups + [[lay_out(open_parts)]] if open_parts else groups


def tree_mask(row, device):
    """Who sees whom in a row: a BlockMask on GPUs; on CPUs, for each block of queries, the keys that it sees at all and
    what to add to its scores on them, 0 or -inf: [(keys (K,), mask (128, K)), ...]. (SDPA takes a bool mask too, and
    makes this of it in every layer.)"""
    enter, exit_ = (torch.from_numpy(times).to(device) for times in (row.enter, row.exit))
    if device.type == "cuda":
        return block_mask(enter, exit_)
    blocks = []
    for mask in query_blocks(enter, exit_):
        keys = mask.any(0).nonzero()[:, 0]
        blocks.append((keys, torch.where(mask[:, keys], 0.0, -torch.inf)))
    return blocks


def query_blocks(enter, exit_):
    """For each block of queries, which of the keys up to its end they see: (128, 128), (128, 256), ..., (128, T). One
    after the other, since all together are T x T."""
    for start in range(0, len(enter), PAD_TO):
        q, stop = torch.arange(start, start + PAD_TO, device=enter.device)[:, None], start + PAD_TO
        yield (torch.arange(stop, device=enter.device) <= q) & (enter[:stop] <= enter[q]) & (enter[q] < exit_[:stop])


def block_mask(enter, exit_):
    """FlexAttention's form of the mask: which blocks of keys a block of queries sees at all, and the rule in them."""
    def sees(batch, head, q, k):
        return (k <= q) & (enter[k] <= enter[q]) & (enter[q] < exit_[k])

    blocks = len(enter) // PAD_TO
    seen = torch.zeros(blocks, blocks, dtype=torch.int32, device=enter.device)
    for i, mask in enumerate(query_blocks(enter, exit_)):
        seen[i, :i + 1] = mask.view(PAD_TO, i + 1, PAD_TO).any(2).any(0)
    order = seen.argsort(dim=1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(seen.sum(1, dtype=torch.int32)[None, None], order[None, None], BLOCK_SIZE=PAD_TO,
                                    mask_mod=sees, seq_lengths=(len(enter), len(enter)))


_flex_attention = torch.compile(flex_attention, dynamic=True, fullgraph=True)


def tree_attention(module, query, key, value, attention_mask, scaling=None, tree=None, **kwargs):
    """Attention within a Row, in transformers' AttentionInterface: (1, heads, T, D) -> (1, T, heads, D).

    Pass tree=tree_mask(row, device) to the model's forward.
    """
    if kwargs.get("sliding_window") or kwargs.get("softcap"):
        raise UserError(f"{type(module).__name__}: sliding windows and soft-capped scores are not built into "
                        "tree_attention")
    if isinstance(tree, BlockMask):
        out = _flex_attention(query, key, value, block_mask=tree, scale=scaling,
                              enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2), None
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    # The blocks' keys are gathered at once, so that the backward pass adds them up at once, not over the whole row for
    # each block.
    keys, masks = zip(*tree)
    gathered, sizes = torch.cat(keys), [len(block) for block in keys]
    key, value = (x.index_select(2, gathered).split(sizes, dim=2) for x in (key, value))
    blocks = [F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
              for q, k, v, mask in zip(query.split(PAD_TO, dim=2), key, value, masks)]
    return torch.cat(blocks, dim=2).transpose(1, 2), None


AttentionInterface.register("tree", tree_attention)


def forward_row(model, row, device):
    """Run a transformers model on a Row; position_ids and the mask are all that makes it a tree."""
    return model(input_ids=torch.from_numpy(row.tokens).long().to(device)[None],           # (1, T)
                 position_ids=torch.from_numpy(row.positions).long().to(device)[None],     # (1, T)
                 use_cache=False, tree=tree_mask(row, device))


# ---------------------------------------------------------------------------------------------------------------------
# Ranks: sharded models, checkpoints, logs

class World:
    """The ranks that train together: torchrun's, or one under plain python."""

    def __init__(self):
        die_with_launcher()
        cuda = torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu")
        if cuda:
            local = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        self.mesh = init_device_mesh(self.device.type, (self.size,))

    def sum(self, *numbers):
        """The sums over all ranks."""
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def share(self, value):
        """Rank 0's value, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]


def quiet_libraries():
    """Silence what users of these scripts can do nothing about."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # FSDP2; nothing is changed in place here


def load_model(auto_class, folder, world, recompute=True, wrap=lambda model: model, **config_changes):
    """Load a transformers model with FSDP2: float32 shards, bfloat16 compute on GPUs, gradients reduced in float32.

    Only rank 0 reads the weights. A head that the folder has no weights for starts at zero. wrap: makes the module that
    is called, if it is not the model itself. recompute: activations are computed again in the backward pass.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        for name, value in config_changes.items():  # as keywords of from_pretrained, unknown names would be dropped
            setattr(config, name, value)
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=torch.float32, attn_implementation="tree")
    except ValueError as error:
        raise UserError(f"{folder}: transformers cannot make the model ({str(error).splitlines()[0]}): use another "
                        "one") from None
    weights, source = {}, None
    if world.rank == 0:
        source, found = auto_class.from_pretrained(folder, config=config, dtype=torch.float32, output_loading_info=True)
        for name in found["missing_keys"]:
            if not name.startswith("score."):
                raise UserError(f"{folder}: no weights for {name}: not a {type(source).__name__}")
            torch.nn.init.zeros_(source.get_parameter(name))
        weights = source.state_dict()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if world.device.type == "cuda" else None,
                                     reduce_dtype=torch.float32)
    for block in model.get_decoder().layers:
        fully_shard(block, mesh=world.mesh, mp_policy=precision)
    # Left unsharded after a forward pass, as is FSDP's default for the root, its parameters would not be those that the
    # optimiser and the checkpoints are given.
    root = fully_shard(wrap(model), mesh=world.mesh, mp_policy=precision, reshard_after_forward=True)
    root.to_empty(device=world.device)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    filled = dict(source.named_buffers()) if source else {}
    for name, buffer in model.named_buffers():  # buffers that are not saved, like rotary frequencies
        buffer.copy_(filled[name] if source else buffer)
        dist.broadcast(buffer, 0)
    return root.train()


def save_model(model, auto_class, target, dtype, source, world):
    """Save a sharded model as transformers wants it, with the source folder's tokenizer and generation config.

    dtype: "float32" or "bfloat16"; None: as the source's.
    """
    dtype = getattr(torch, dtype) if dtype else AutoConfig.from_pretrained(source).dtype or torch.float32
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.rank == 0:
        with torch.device("meta"):
            plain = auto_class.from_config(model.config, dtype=dtype)
        part = Path(f"{target}.tmp")
        shutil.rmtree(part, ignore_errors=True)
        tied = plain.all_tied_weights_keys
        plain.save_pretrained(part, state_dict={name: weight.to(dtype) for name, weight in weights.items()
                                                if name not in tied}, max_shard_size="5GB")
        load_tokenizer(source).save_pretrained(part)
        if (source / "generation_config.json").exists():
            shutil.copy(source / "generation_config.json", part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    dist.barrier()


class Checkpoint:
    """Model, optimiser and position of an unfinished training, in FOLDER.ckpt-STEP; the newest whole one counts."""

    def __init__(self, target, model, optimizer, world):
        self.target, self.model, self.optimizer, self.world = target, model, optimizer, world

    def folders(self):
        """Whole checkpoints, oldest first."""
        return sorted(self.target.parent.glob(f"{self.target.name}.ckpt-*"),
                      key=lambda path: int(path.name.split("-")[-1]))

    def state(self):
        """Everything that a step changes: {name: tensor}. (Nothing random is left to save: the order of the batches
        comes from the seed, the learning rate from the step.)"""
        tensors = {}
        for name, weight in self.model.named_parameters():
            moments = self.optimizer.state[weight]
            if not moments:  # as AdamW begins
                moments.update(step=torch.zeros((), device=weight.device), exp_avg=torch.zeros_like(weight),
                               exp_avg_sq=torch.zeros_like(weight))
            tensors[name] = weight.detach()
            tensors |= {f"{name}/{moment}": tensor for moment, tensor in moments.items()}
        return tensors

    def save(self, step):
        part, old = Path(f"{self.target}.ckpt.tmp"), self.folders()
        dcp.save(self.state(), checkpoint_id=part)
        if self.world.rank == 0:
            part.rename(f"{self.target}.ckpt-{step}")
            for folder in old:
                shutil.rmtree(folder)
        dist.barrier()

    def load(self):
        """Load the newest checkpoint -> the number of steps done, 0 if there is none."""
        if self.world.rank == 0:
            shutil.rmtree(f"{self.target}.ckpt.tmp", ignore_errors=True)
        if not self.folders():
            return 0
        newest = self.folders()[-1]
        dcp.load(self.state(), checkpoint_id=newest)  # in place
        return int(newest.name.split("-")[-1])


def remove_checkpoints(target):
    """Once a stage is complete."""
    for folder in target.parent.glob(f"{target.name}.ckpt-*"):
        shutil.rmtree(folder, ignore_errors=True)


class Log:
    """A line a step in RUN/log.jsonl and in the progress bar, on rank 0; cut back to where a resumed training
    goes on."""

    def __init__(self, run, stage, steps, done, world):
        self.path, self.stage, self.steps, self.world = run / "log.jsonl", stage, steps, world
        self.bar = progress_bar(steps, stage, "steps", initial=done)
        if world.rank == 0:
            cut_log(run, stage, done)
        dist.barrier()

    def lines(self):
        """This stage's lines so far."""
        return [line for line in read_log(self.path.parent) if line["stage"] == self.stage]

    def write(self, step, **numbers):
        if self.world.rank == 0:
            with open(self.path, "a") as file:
                file.write(json.dumps({"stage": self.stage, "step": step, "steps": self.steps, **numbers}) + "\n")
            self.bar.set_postfix_str(" ".join(f"{name} {value:.3g}" for name, value in list(numbers.items())[:3]),
                                     refresh=False)
            self.bar.update()


# ---------------------------------------------------------------------------------------------------------------------
# The optimiser step

def make_batches(sizes, batch, epochs, seed):
    """Deal groups into optimiser steps: the epochs' groups, each epoch's in a seeded order of its own, are one stream,
    from which a step takes groups as long as that brings it closer to `batch` pairs (or states).

    sizes: pairs of each group -> a list of group numbers for every step. A last step of less than half a batch joins
    the one before it.
    """
    stream = []
    for epoch in range(epochs):
        order = [group for group, size in enumerate(sizes) if size]
        random.Random(f"{seed}/{epoch}").shuffle(order)
        stream += order
    steps, step, count = [], [], 0
    for group in stream:
        if step and abs(count + sizes[group] - batch) >= abs(count - batch):
            steps.append(step)
            step, count = [], 0
        step, count = step + [group], count + sizes[group]
    if steps and count < batch / 2:
        return [*steps[:-1], steps[-1] + step]
    return steps + [step]


def deal(rows, ranks):
    """Give every rank rows of about as many tokens, and all the same number of micro-batches -> [[(row, weight), ...],
    ...]: the shorter hands are filled up with rows of weight 0, since FSDP needs all ranks in every pass."""
    hands, loads = [[] for _ in range(ranks)], [0] * ranks
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        least = loads.index(min(loads))
        hands[least].append((row, 1.0))
        loads[least] += len(row.tokens)
    shortest = min(rows, key=lambda row: len(row.tokens))
    longest_hand = max(len(hand) for hand in hands)
    return [hand + [(shortest, 0.0)] * (longest_hand - len(hand)) for hand in hands]


def imbalance(rows, ranks):
    """How much more than the even share the rank with the most tokens gets in one optimiser step: 0.1 is 10%. At most
    one row's tokens."""
    loads = [sum(len(row.tokens) for row, weight in hand if weight) for hand in deal(rows, ranks)]
    return max(loads) * ranks / sum(loads) - 1


def path_lengths(steps):
    """How many tokens lie between the start of the prompt and each node's end: {node: tokens}."""
    length = {-1: 0}
    for node, parent in enumerate(steps.parents):
        length[node] = length[parent] + len(steps.tokens[node])
    return length


def tokens_of_nodes(all_steps):
    """How many tokens one row for each wanted node would hold."""
    total = 0
    for steps in all_steps:
        length = path_lengths(steps)
        total += sum(length[node] for node in steps.wanted)
    return total


def training_bill(run, stage, unit, all_steps, scored, model):
    """What a training took, for its summary: the model's parameters, and its tokens in rows, padding included, beside
    those that one row for each state (or pair) would have held in as many passes. (Left out: what a killed try did
    after its last checkpoint, and the measurements on held-out states on the way.)

    unit: what log.jsonl counts, "states" or "pairs". all_steps: what was trained on. scored: groups of rows that were
    scored once. model: the folder of what was trained.
    """
    lines = [line for line in read_log(run) if line["stage"] == stage]
    all_steps = list(all_steps)
    passes = sum(line[unit] for line in lines) / sum(len(steps.wanted) for steps in all_steps)
    return {"parameters": model_size(model), "tokens trained on": sum(line["tokens"] for line in lines),
            "tokens trained on, a row each": round(passes * tokens_of_nodes(all_steps)),
            "tokens scored": sum(len(row.tokens) for group in scored for row in group),
            "imbalance between ranks": max(line["imbalance"] for line in lines)}


def learning_rate(step, steps, peak):
    """Linear warm-up over 3% of the steps, then a cosine down to 10% of the peak."""
    warmup = max(1, round(0.03 * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def optimizer_step(model, optimizer, rows, row_loss, lr, clip, world):
    """One optimiser step on rows -> the gradient's norm.

    row_loss(row, weight) is the row's share of the loss: its sum, divided by the count of the *whole* step; a weight
    of 0 marks a row that only keeps the ranks in step. FSDP averages gradients over the ranks, so the loss is
    multiplied by their number.
    """
    for row, weight in deal(rows, world.size)[world.rank]:
        (row_loss(row, weight) * weight * world.size).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if not math.isfinite(norm.item()):
        raise UserError("the gradient is not finite: start anew with a lower --lr and --overwrite")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


@torch.no_grad()
def score_nodes(score, groups, n_nodes, world, title=None):
    """What score(row) -> (S,) says of the scored nodes of all rows: (n_nodes,), NaN for nodes that no row scores.

    title: of a progress bar.
    """
    total, seen = torch.zeros(2, n_nodes, device=world.device)
    hand = deal([row for group in groups for row in group], world.size)[world.rank]
    bar = progress_bar(len(hand), title, "rows")
    for row, weight in hand:
        nodes = torch.from_numpy(row.nodes).to(world.device)
        total[nodes] += score(row) * weight
        seen[nodes] += weight
        bar.update()
    bar.close()
    for part in (total, seen):
        dist.all_reduce(part)
    return (total / seen).cpu()


# ---------------------------------------------------------------------------------------------------------------------
# The critic

def critic_loss(logit, value):
    """BCE between soft labels and V = sigmoid(logit), one loss a state (Eq. 15): (S,), (S,) -> (S,)."""
    return F.binary_cross_entropy_with_logits(logit, value, reduction="none")


def node_logits(model, row, device):
    """The critic's logits of a row's scored nodes, each read at the node's last token: (S,)."""
    logits = forward_row(model, row, device).logits[0, :, 0].float()  # (T,)
    return logits[torch.from_numpy(row.last()).to(device)]


def predict(model, groups, n_nodes, world, title=None):
    """V_phi of all scored nodes of the rows, as score_nodes gives them."""
    model.eval()
    values = score_nodes(lambda row: torch.sigmoid(node_logits(model, row, world.device)),
                         groups, n_nodes, world, title)
    model.train()
    return values


def node_tokens(tree, tokenizer, same_vocabulary, system):
    """A tree's tokens for the critic: list[list[int]], one a node.

    The prompt is rendered with the critic's own chat template. The steps' tokens are the sampled ones where critic and
    policy share a vocabulary; else each step's text is tokenised for itself, so that a state's tokens are always a
    prefix of its successors', and the critic's own end-of-text id stands for the policy's.
    """
    tokens = [render_prompt(tokenizer, tree, system)[1]]
    for node in tree["nodes"][1:]:
        if same_vocabulary:
            tokens.append(node["ids"])
        else:
            ended = "reward" in node and not node.get("cut") and tokenizer.eos_token_id is not None
            tokens.append(tokenizer(node["text"], add_special_tokens=False).input_ids
                          + [tokenizer.eos_token_id] * ended)
    return tokens


def read_trees(path):
    """Yield (tree, number of its first node in the whole file)."""
    first = 0
    for _, tree in read_jsonl(path):
        yield tree, first
        first += len(tree["nodes"])


def held_out(tree, share):
    """Whether a problem is kept from the critic's training: by the hash of its prompt, so that it stays so."""
    return int(hashlib.sha256(tree["prompt"].encode()).hexdigest()[:8], 16) < share * 2**32


def labelled_states(tree):
    return [node for node, fields in enumerate(tree["nodes"]) if "value" in fields]


def solution_paths(tree):
    """The states on each selected solution: list of lists of nodes."""
    parents = [node["parent"] for node in tree["nodes"]]
    ends = [node for node, fields in enumerate(tree["nodes"]) if fields.get("visits") and "reward" in fields]
    return [ancestors(parents, end) for end in ends]


def correlation(x, y):
    """Pearson's correlation; 0 where one side is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def judge(value, label, n, problem, paths):
    """How good V_phi is on states that it was not trained on -> {name: number}, with a calibration table.

    value, label, n, problem: (S,) V_phi, Monte-Carlo mean, its sample size, and the problem's number. paths: indices of
    the states on each solution.
    """
    v = np.clip(value, 1e-7, 1 - 1e-7)
    p = np.clip(label, 1e-7, 1 - 1e-7)
    several = n > 1
    noise = label * (1 - label) / np.maximum(n - 1, 1)  # unbiased for the variance of the Monte-Carlo mean

    def within(x):
        sums, counts = np.bincount(problem, x), np.bincount(problem)
        return x - (sums / np.maximum(counts, 1))[problem]

    bins = np.minimum((value * 10).astype(int), 9)
    table = [{"from": b / 10, "to": (b + 1) / 10, "states": int((bins == b).sum()),
              "V": float(value[bins == b].mean()), "Monte-Carlo": float(label[bins == b].mean())}
             for b in range(10) if (bins == b).any()]
    return {"held-out states": len(value),
            "BCE": float(-(label * np.log(v) + (1 - label) * np.log(1 - v)).mean()),
            "BCE floor (the labels' entropy)": float(-(label * np.log(p) + (1 - label) * np.log(1 - p)).mean()),
            "squared error against the true V": float(((value - label) ** 2 - noise)[several].mean()),
            "correlation with Monte-Carlo": correlation(value, label),
            "correlation within problems": correlation(within(value), within(label)),
            "std of V within solutions": float(np.mean([value[path].std() for path in paths if len(path) > 1]
                                                       or [0.0])),
            "calibration": table}


def judge_held_out(trees_path, values, share):
    """judge() on the held-out problems of a trees file, or {} if there are none. values: (nodes,) in file order."""
    columns, paths = [], []
    for number, (tree, first) in enumerate(read_trees(trees_path)):
        if held_out(tree, share):
            index = {node: len(columns) + i for i, node in enumerate(labelled_states(tree))}
            columns += [(float(values[first + node]), tree["nodes"][node]["value"], tree["nodes"][node]["n"], number)
                        for node in index]
            paths += [[index[node] for node in path] for path in solution_paths(tree)]
    if not columns:
        return {}
    value, label, n, problem = np.array(columns).T
    return judge(value, label, n, problem.astype(int), paths)


# ---------------------------------------------------------------------------------------------------------------------
# The stage

def train(args, world, tree_steps, labels, n_nodes):
    """Fit the critic and save it as RUN/critic."""
    base, target = find_model(args.critic), args.run / "critic"
    training, holdout = ([steps for steps, held in tree_steps() if held == want] for want in (False, True))
    groups, test_groups = pack(training, args.max_tokens, args.batch), pack(holdout, args.max_tokens)
    if not groups:
        raise UserError(f"{args.run / 'trees.jsonl'}: all problems are held out: lower --holdout {args.holdout}")
    sizes = [sum(len(row.nodes) for row in group) for group in groups]
    batches = make_batches(sizes, args.batch, args.epochs, args.seed)
    # transformers' default dropout before the head, 0.1, would be on in training
    model = load_model(AutoModelForTokenClassification, base, world, args.recompute,
                       num_labels=1, classifier_dropout=0.0)
    optimizer = make_optimizer(model)
    checkpoint = Checkpoint(target, model, optimizer, world)
    done = checkpoint.load()
    log = Log(args.run, "train_critic", len(batches), done, world)
    if world.rank == 0:
        print(f"{sum(sizes):,} states in {sum(map(len, groups)):,} rows, {len(batches):,} steps; "
              f"{sum(len(steps.wanted) for steps in holdout):,} states of {len(holdout)} problems held out", flush=True)
    evaluate_every = max(1, len(batches) // max(args.epochs, 4))
    for step in range(done, len(batches)):
        started = time.time()
        rows = [row for group in batches[step] for row in groups[group]]
        count, tokens = (sum(len(getattr(row, part)) for row in rows) for part in ("nodes", "tokens"))
        sums = torch.zeros(2, device=world.device)

        def row_loss(row, weight):
            label = labels[torch.from_numpy(row.nodes)].to(world.device)
            logit = node_logits(model, row, world.device)
            losses = critic_loss(logit, label)
            sums.add_(weight * torch.stack([losses.sum(), (torch.sigmoid(logit) - label).sum()]).detach())
            return losses.sum() / count

        lr = learning_rate(step, len(batches), args.lr)
        norm = optimizer_step(model, optimizer, rows, row_loss, lr, args.clip, world)
        rate = tokens / (time.time() - started)
        loss, bias = (total / count for total in world.sum(*sums.tolist()))
        numbers = {"loss": loss, "bias": bias}
        if test_groups and ((step + 1) % evaluate_every == 0 or step + 1 == len(batches)):
            values = predict(model, test_groups, n_nodes, world)
            scored = ~values.isnan()
            numbers["held_out_bce"] = F.binary_cross_entropy(values[scored], labels[scored]).item()
        log.write(step + 1, **numbers, grad_norm=norm, lr=lr, states=count, tokens=tokens,
                  imbalance=imbalance(rows, world.size), tokens_per_s=rate)
        if (step + 1) % args.save_every == 0 and step + 1 < len(batches):
            checkpoint.save(step + 1)
    log.bar.close()
    save_model(model, AutoModelForTokenClassification, target, args.save_dtype, base, world)


def save_values(path, values, name="values", **made_from):
    """Write a tensor with one number a node; the metadata says what it was made from."""
    part = Path(f"{path}.tmp")
    save_file({name: values}, part, metadata=made_from)
    part.replace(path)


def load_values(path, name="values", **made_from):
    """Read a tensor with one number a node; UserError unless the file was made from what it should be."""
    if not path.exists():
        raise UserError(f"{path}: no such file: run train_critic.py with the same --run first")
    with safe_open(path, "pt") as file:
        for what, expected in made_from.items():
            found = (file.metadata() or {}).get(what)
            if found != expected:
                raise UserError(f"{path}: was made from another {what} ({found}, now {expected}): run the stage that "
                                "wrote it with --overwrite, or restore what it was made from")
        return file.get_tensor(name)


def add_training_flags(parser, batch, unit, lr):
    training = parser.add_argument_group("training")
    training.add_argument("--lr", type=bounded(float), default=lr,
                          help="peak learning rate (default, as in the paper: %(default)s)")
    training.add_argument("--batch", type=bounded(int), default=batch,
                          help=f"{unit} an optimiser step (default, as in the paper: %(default)s)")
    training.add_argument("--epochs", type=bounded(int), default=1, help="passes over the data (default: %(default)s)")
    training.add_argument("--clip", type=bounded(float), default=1.0,
                          help="largest norm of the gradient (default: %(default)s)")
    training.add_argument("--max-tokens", type=bounded(int), default=16384, help="tokens a row, the unit of a forward "
                          "and backward pass: lower it when memory runs out (default: %(default)s)")
    training.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True,
                          help="compute activations again in the backward pass: far less memory, a third more time "
                          "(default: yes)")
    training.add_argument("--save-every", type=bounded(int), default=50,
                          help="steps between checkpoints (default: %(default)s)")
    training.add_argument("--save-dtype", choices=["float32", "bfloat16"],
                          help="of the saved weights (default: as loaded)")


def training_settings(args, *more):
    """The flags that change what a trainer writes."""
    return {name: getattr(args, name) for name in
            ("lr", "batch", "epochs", "clip", "max_tokens", "save_dtype", "seed", *more)}


def check_trees(run):
    """Hold trees.jsonl against label.json, and that against generate.json -> (the trees' hash, the policy's)."""
    path, label = run / "trees.jsonl", stage_record(run, "label")
    if not path.exists() or "summary" not in label:
        raise UserError(f"{path}: not complete: run label.py with the same --run again")
    if file_hash(path) != label["trees"]:
        raise UserError(f"{path}: not the file that label.py wrote: restore it, or run label.py with --overwrite")
    generate = stage_record(run, "generate")
    sampled = {"policy": generate["inputs"]["policy"], "solutions.jsonl": generate.get("solutions")}
    for what, expected in sampled.items():
        if label["inputs"][what] != expected:
            raise UserError(f"{path}: is of another {what} ({label['inputs'][what]}) than {run / 'generate.json'} "
                            f"({expected}): run label.py with --overwrite, or restore what belongs together")
    return label["trees"], sampled["policy"]


def check_not_overwritten(source, target):
    """A stage must not read the folder that it writes, since --overwrite removes that one first."""
    if source.resolve() == target.resolve():
        raise UserError(f"{source}: is what this stage writes: use another --run, or move it and name its new place")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_flags(parser)
    parser.add_argument("--critic", default="Qwen/Qwen2.5-Math-7B-Instruct", help="the model that becomes the critic, "
                        "a language model of which transformers has an AutoModelForTokenClassification, or, to "
                        "warm-start, an earlier critic; a folder or a name on the hub (default, as in the paper: "
                        "%(default)s)")
    parser.add_argument("--holdout", type=float, default=0.05, help="share of the problems kept for testing the critic "
                        "(default: %(default)s)")
    add_training_flags(parser, batch=512, unit="states", lr=5e-6)
    return parser.parse_args()


def main():
    args = parse_args()
    quiet_libraries()
    trees_path, values_path, critic = args.run / "trees.jsonl", args.run / "values.safetensors", args.run / "critic"
    trees_hash, policy = check_trees(args.run)
    base, generate = find_model(args.critic), stage_record(args.run, "generate")
    check_not_overwritten(base, critic)
    world, summary = World(), None
    if world.rank == 0:
        summary = start_stage(args.run, "train_critic", training_settings(args, "holdout"),
                              {"trees.jsonl": trees_hash, "critic base": model_hash(base)},
                              [critic, values_path], args.overwrite)
    if summary := world.share(summary):
        remove_checkpoints(critic)
        return world.rank > 0 or print_complete("train_critic", summary)

    tokenizer = load_tokenizer(base)
    same = tokenizer.get_vocab() == load_tokenizer(find_model(generate["model"])).get_vocab()
    labels = torch.tensor([node.get("value", math.nan) for tree, _ in read_trees(trees_path) for node in tree["nodes"]])

    def tree_steps(every_node=False):
        """Yield (Steps, whether the problem is held out) of every tree."""
        for tree, first in read_trees(trees_path):
            wanted = range(len(tree["nodes"])) if every_node else labelled_states(tree)
            yield Steps(tree["id"], first, [node["parent"] for node in tree["nodes"]],
                        node_tokens(tree, tokenizer, same, generate["settings"]["system"]), list(wanted)), \
                held_out(tree, args.holdout)

    groups = pack((steps for steps, _ in tree_steps(every_node=True)), args.max_tokens)  # first: a path may be too long
    if not critic.exists():
        train(args, world, tree_steps, labels, len(labels))
    model = load_model(AutoModelForTokenClassification, critic, world)
    values = predict(model, groups, len(labels), world, "scoring every node")
    if world.rank == 0:
        save_values(values_path, values, trees=trees_hash, critic=model_hash(critic), policy=policy)
        numbers = judge_held_out(trees_path, values, args.holdout)
        table = numbers.pop("calibration", [])
        training = (steps for steps, held in tree_steps() if not held)
        finish_stage(args.run, "train_critic", {
            "nodes scored": len(values), "mean V": values.mean().item(), "held-out states": 0, **numbers,
            **training_bill(args.run, "train_critic", "states", training, groups, critic),
            "tokens scored, a row each": tokens_of_nodes(steps for steps, _ in tree_steps(every_node=True))},
                     calibration=table, critic=model_hash(critic))
        remove_checkpoints(critic)
        print("  calibration: " + "  ".join(f"{row['V']:.2f}->{row['Monte-Carlo']:.2f} ({row['states']})"
                                            for row in table))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_stage(main)
