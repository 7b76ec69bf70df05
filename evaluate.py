r"""DAPO, stage 5 of 5: compare policies on a benchmark, with intervals; write the report and its picture.

Greedy accuracy of every model and, with --n, of n samples a problem: avg@n (the mean accuracy of a sample), pass@k,
maj@k and, with --critic, best-of-n by V_phi(s_{T-1}), the value of the last state before a response's end. The paired
tests compare the first two models on the same problems: two checkpoints, that is, not two methods.

Reads:   RUN/test.jsonl (imported from any data file by --test), the models; what the other stages left in RUN
Writes:  RUN/answers.jsonl  a line for each model, problem and kind (greedy, sampled): model, id, kind, answers
         RUN/report.json    {"models": {name: {"greedy": ..., ...}}, "paired": ..., ...}
         RUN/report.md, RUN/report.png

Laptop:  python evaluate.py --run runs/toy --n 4 --max-tokens 64 --critic runs/toy/critic
GPUs:    torchrun --nproc-per-node 8 -- evaluate.py --run runs/math --test math_test.jsonl
Interrupted? Run the same command again: it goes on with the answers that are missing.
"""
import argparse
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from transformers import AutoModelForTokenClassification

from generate import (Request, Team, UserError, add_engine_flags, add_problem_flags, add_run_flags, bill, bounded,
                      equivalent, file_hash, find_model, finish_stage, grading_pool, import_problems, is_code,
                      keep_in_record, last_boxed, load_problems, load_tokenizer, model_hash, pass_at_k, print_complete,
                      read_jsonl, read_log, render_prompt, run_stage, sample_stage, stage_record, start_stage,
                      whole_file, write_json)
from label import Tree
from train_critic import (Steps, World, ancestors, held_out, load_model, load_values, node_tokens, pack, path_lengths,
                          predict, quiet_libraries, read_trees)

ROW_TOKENS = 16384  # tokens a row when the critic scores answers

# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def wilson(right, n, z=1.96):
    """Wilson's 95% interval of a share."""
    share, spread = right / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return [centre - half, centre + half]


def bootstrap(scores, draws=10_000, seed=0):
    """95% interval of the mean of one score a problem, by drawing problems with replacement."""
    scores, rng = np.asarray(scores, dtype=float), np.random.default_rng(seed)
    means = [scores[rng.integers(0, len(scores), len(scores))].mean() for _ in range(draws)]
    return [float(x) for x in np.quantile(means, [0.025, 0.975])]


def mcnemar(first, second):
    """The exact two-sided McNemar test on 0/1 scores of the same problems -> (only first right, only
    second right, p)."""
    only_first = sum(a > b for a, b in zip(first, second))
    only_second = sum(b > a for a, b in zip(first, second))
    n = only_first + only_second
    tail = sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1)) / 2 ** n
    return only_first, only_second, min(1.0, 2 * tail)


def majority(answers):
    """Whether the most frequent answer is right: answers are grouped by equivalence, one without a box has no vote, and
    groups that tie share the credit. (maj@k takes the first k answers.)"""
    groups = []  # [answer, votes, reward]
    for answer in answers:
        boxed = last_boxed(answer["text"]) if answer["finish"] == "stop" else None
        if boxed is None or not boxed.strip():
            continue
        for group in groups:
            if equivalent(group[0], boxed):
                group[1] += 1
                break
        else:
            groups.append([boxed, 1, answer["reward"]])
    most = max((votes for _, votes, _ in groups), default=0)
    tied = [reward for _, votes, reward in groups if votes == most]
    return sum(tied) / len(tied) if tied else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Best of n

def end_states(tokenizer, critic_tokenizer, problems, answers, system, steps_like):
    """The last state before each answer's end, as packing wants it -> ([Steps, ...], {id: [node number, ...]}, nodes).
    answers: {id: [answer, ...]}. steps_like: label.py's delimiter and max_states."""
    same = critic_tokenizer.get_vocab() == tokenizer.get_vocab()
    all_steps, states, first = [], {}, 0
    for problem in problems:
        prompt, ids = render_prompt(tokenizer, problem, system)
        solutions = answers[problem["id"]]
        tree = Tree({**problem, "prompt": prompt, "prompt_ids": ids, "solutions": solutions}, tokenizer,
                    len(solutions), 0, *steps_like)
        parents = [tree.nodes[tree.visit(solution)]["parent"] for solution in solutions]
        tokens = node_tokens(tree.record(), critic_tokenizer, same, system)
        all_steps.append(Steps(problem["id"], first, [node["parent"] for node in tree.nodes], tokens,
                               sorted(set(parents))))
        states[problem["id"]] = [first + parent for parent in parents]
        first += len(tree.nodes)
    return all_steps, states, first


def end_values(critic, models, problems, answers, system, steps_like):
    """V_phi(s_{T-1}) of every sampled answer: {model name: {id: [value, ...]}}. answers: {model name: {id: [...]}}."""
    world, critic_tokenizer = World(), load_tokenizer(critic)
    model = load_model(AutoModelForTokenClassification, critic, world)
    result = {}
    for name, folder in models.items():
        all_steps, states, n_nodes = end_states(load_tokenizer(folder), critic_tokenizer, problems, answers[name],
                                                system, steps_like)
        longest = max(max(path_lengths(steps).values()) for steps in all_steps)
        values = predict(model, pack(all_steps, max(ROW_TOKENS, longest)), n_nodes, world, f"best of n ({name})")
        result[name] = {problem: values[nodes].tolist() for problem, nodes in states.items()}
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The report

def score_model(greedy, sampled, values, ks, vote):
    """One model's numbers. greedy, sampled: a list of answers for each problem; values: a list of V_phi, or None.
    vote: whether answers can be compared with one another (math) or not (code)."""
    right = [answers[0]["reward"] for answers in greedy]
    scores = {"greedy": sum(right) / len(right), "greedy interval": wilson(sum(right), len(right)),
              "greedy answers cut off": sum(answers[0]["finish"] == "length" for answers in greedy),
              "mean tokens": sum(len(answers[0]["ids"]) for answers in greedy) / len(greedy)}
    if not sampled:
        return scores
    n = len(sampled[0])
    rewards = [[answer["reward"] for answer in answers] for answers in sampled]
    means = [sum(of_problem) / n for of_problem in rewards]
    scores |= {"sampled": sum(means) / len(means), "sampled interval": bootstrap(means), "n": n}
    with grading_pool() as pool:
        for k in ks:
            scores[f"pass@{k}"] = sum(pass_at_k(n, int(sum(of_problem)), k) for of_problem in rewards) / len(rewards)
            if vote:
                votes = pool.map(majority, [answers[:k] for answers in sampled])
                scores[f"maj@{k}"] = sum(votes) / len(sampled)
    if values:
        best = [of_problem[int(np.argmax(v))] for of_problem, v in zip(rewards, values)]
        scores |= {f"best-of-{n}": sum(best) / len(best), f"best-of-{n} interval": wilson(sum(best), len(best))}
    return scores


def compare(names, greedy, sampled):
    """The paired comparison of the second model with the first."""
    first, second = ([answers[0]["reward"] for answers in greedy[name]] for name in names)
    only_first, only_second, p = mcnemar(first, second)
    result = {"models": names, "greedy difference": sum(second) / len(second) - sum(first) / len(first),
              "greedy difference interval": bootstrap(np.subtract(second, first)),
              f"only {names[0]} right": only_first, f"only {names[1]} right": only_second, "McNemar p": p}
    if sampled[names[0]]:
        first, second = ([np.mean([answer["reward"] for answer in answers]) for answers in sampled[name]]
                         for name in names)
        result |= {"sampled difference": float(np.mean(second) - np.mean(first)),
                   "sampled difference interval": bootstrap(np.subtract(second, first))}
    return result


def percent(value, interval=None):
    return f"{value:.1%}" + (f" [{interval[0]:.1%}, {interval[1]:.1%}]" if interval else "")


def report_table(report):
    """The table of models, as lines of Markdown."""
    models = report["models"]
    extra = [key for key in next(iter(models.values())) if key.startswith(("pass@", "maj@", "best-of-"))
             and "interval" not in key and key != "pass@1" and key != "maj@1"]
    n = next(iter(models.values())).get("n")
    head = ["policy", "greedy accuracy [95%]"] + [f"sampled accuracy, avg@{n} [95%]"] * bool(n) + extra
    rows = [[name, percent(m["greedy"], m["greedy interval"])]
            + ([percent(m["sampled"], m["sampled interval"])] if n else []) + [percent(m[key]) for key in extra]
            for name, m in models.items()]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in [head, *rows]]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def report_lines(report):
    """report.md."""
    left_out = f" ({report['rows left out']} rows without a gold answer left out)" * bool(report["rows left out"])
    lines = [f"# {report['problems']} problems{left_out}", "", *report_table(report), ""]
    if paired := report.get("paired"):
        first, second = paired["models"]
        lines += [f"Greedy, {second} against {first}: {paired['greedy difference']:+.1%} "
                  f"[{paired['greedy difference interval'][0]:+.1%}, {paired['greedy difference interval'][1]:+.1%}]; "
                  f"only {first} right: {paired[f'only {first} right']}, "
                  f"only {second} right: {paired[f'only {second} right']}; "
                  f"exact McNemar test p = {paired['McNemar p']:.2g}."]
        if "sampled difference" in paired:
            low, high = paired["sampled difference interval"]
            lines += [f"Sampled: {paired['sampled difference']:+.1%} [{low:+.1%}, {high:+.1%}] "
                      "(bootstrap over problems)."]
        lines += ["",
                  "The test compares these two checkpoints, not two methods: another seed gives another checkpoint."]
    return lines + (cost_lines(report["costs"]) if report["costs"] else [])


# ---------------------------------------------------------------------------------------------------------------------
# The cost

def stage_costs(run):
    """What the run's stages have cost: [{"stage", "parameters", "inferred", "trained", "FLOPs", "paper's way"}, ...],
    as the paper counts: FLOPs = N_model (2 N_infer + 6 N_train), in tokens (Appendix E; recomputing is left out).

    The paper's way is what the same data would have cost if every state of every selected solution were completed and
    every state and (state, action) had a row of its own. Stages that have not run here are left out, and so are all
    where the policy was sampled from in another run. evaluate's models count as the policy does.
    """
    records = {stage: stage_record(run, stage) for stage in ("generate", "label", "train_critic", "train_actor")
               if (run / f"{stage}.json").exists()}
    summary = {stage: record["summary"] for stage, record in records.items() if "summary" in record}
    if "parameters" not in records.get("generate", {}):
        return []
    policy, rows = records["generate"]["parameters"], []

    def add(stage, parameters, ours, theirs=None):
        if not any(ours):  # its lines of log.jsonl are in another run
            return
        flops = [parameters * (2 * inferred + 6 * trained) for inferred, trained in (ours, theirs or ours)]
        rows.append({"stage": stage, "parameters": parameters, "inferred": ours[0], "trained": ours[1],
                     "FLOPs": flops[0], "paper's way": flops[1]})

    def inferred(stage):
        took = bill(run, stage)
        return took["tokens sampled"] + took["prompt tokens computed"]

    add("generate", policy, (inferred("generate"), 0))
    if "label" in summary:
        expected, sampled = records["label"]["forecast"], bill(run, "label")["tokens sampled"]
        more = expected["sampled, every state"] - expected["sampled"] + expected["prompt, every state"]
        add("label", policy, (inferred("label"), 0), (round(sampled + more), 0))
    for stage in ("train_critic", "train_actor"):
        if stage in summary:
            took = summary[stage]
            add(stage, took["parameters"], (took["tokens scored"], took["tokens trained on"]),
                (took["tokens scored, a row each"], took["tokens trained on, a row each"]))
    add("evaluate", policy, (inferred("evaluate"), 0))
    return rows


def cost_lines(costs):
    """The table of stage_costs, as lines of Markdown."""
    total = {key: sum(row[key] for row in costs) for key in ("inferred", "trained", "FLOPs", "paper's way")}
    lines = ["| stage | parameters | tokens inferred | tokens trained on | FLOPs | the paper's way |",
             "|---|---|---|---|---|---|"]
    for row in [*costs, {"stage": "all", **total}]:
        size, flops, theirs = f"{row['parameters']:,}" if "parameters" in row else "", row["FLOPs"], row["paper's way"]
        lines.append(f"| {row['stage']} | {size} | {row['inferred']:,} | {row['trained']:,} | {flops:.2e} | "
                     f"{theirs:.2e} ({theirs / flops:.1f}x) |")
    return ["", "FLOPs = parameters x (2 x tokens inferred + 6 x tokens trained on). The paper's way: every state of "
            "every selected solution completed, a row for each state and each pair.", "", *lines]


# ---------------------------------------------------------------------------------------------------------------------
# The picture

def value_curve(run, share):
    """A wrong solution on which V_phi falls: -> (tree, its nodes from the root, their V_phi), of a held-out
    problem if there is one; None if the run has no values. Chosen: the largest fall in one step that the
    Monte-Carlo values show too."""
    try:
        values, best = load_values(run / "values.safetensors", trees=file_hash(run / "trees.jsonl")), None
    except (UserError, FileNotFoundError):  # no critic in this run, or one of other trees
        return None
    for tree, first in read_trees(run / "trees.jsonl"):
        parents = [node["parent"] for node in tree["nodes"]]
        for end, fields in enumerate(tree["nodes"]):
            if fields.get("visits") and fields.get("reward") == 0.0 and not fields.get("cut"):
                path = ancestors(parents, end)
                v = values[[first + node for node in path]].numpy()
                sampled = np.array([tree["nodes"][node]["value"] for node in path])
                falls = np.minimum(v[:-1] - v[1:], sampled[:-1] - sampled[1:])
                fall = (held_out(tree, share), float(np.max(falls, initial=0.0)))
                if best is None or fall > best[0]:
                    best = fall, tree, [*path, end], v
    return best and best[1:]


def draw(report, run, path):
    """report.png: accuracies, the critic's calibration, the actor's training, and one solution's value step by step."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(2, 2, figsize=(12, 8.5), constrained_layout=True)
    draw_accuracies(axes[0, 0], report)
    critic = stage_record(run, "train_critic") if (run / "train_critic.json").exists() else {}
    draw_calibration(axes[0, 1], critic)
    draw_training(axes[1, 0], run)
    draw_curve(axes[1, 1], value_curve(run, critic.get("settings", {}).get("holdout", 0.0)))
    figure.savefig(f"{path}.tmp", format="png", dpi=110)
    Path(f"{path}.tmp").replace(path)


def draw_accuracies(axis, report):
    names = list(report["models"])
    for offset, kind in enumerate(["greedy", "sampled"]):
        models = [model for model in report["models"].values() if kind in model]
        if models:
            heights = np.array([model[kind] for model in models])
            intervals = np.array([model[f"{kind} interval"] for model in models]).T
            x = np.arange(len(names)) + 0.4 * offset - 0.2
            bars = axis.bar(x, heights, 0.36, label=kind, yerr=np.abs(intervals - heights), capsize=5)
            axis.bar_label(bars, [f"{height:.1%}" for height in heights], label_type="center", color="white")
    axis.set(title=f"Accuracy on {report['problems']} problems, with 95% intervals", ylim=(0, 1))
    axis.set_xticks(range(len(names)), names)
    axis.legend(loc="upper left")


def draw_calibration(axis, critic):
    axis.set(title="Critic on held-out problems", xlabel="V (mean of a bin)", ylabel="Monte-Carlo value",
             xlim=(0, 1), ylim=(0, 1))
    axis.plot([0, 1], [0, 1], color="grey", linewidth=1, label="perfect calibration")
    table = critic.get("calibration")
    if not table:
        return axis.text(0.5, 0.4, "no critic in this run", ha="center")
    sizes = np.array([row["states"] for row in table])
    axis.scatter([row["V"] for row in table], [row["Monte-Carlo"] for row in table], s=20 + 300 * sizes / sizes.max(),
                 alpha=0.7, label="states (area: how many)")
    axis.legend(loc="upper left")


def draw_training(axis, run):
    lines = [line for line in read_log(run) if line["stage"] == "train_actor"]
    axis.set(title="Actor", xlabel="optimiser step")
    if not lines:
        return axis.text(0.5, 0.5, "no actor in this run", ha="center", transform=axis.transAxes)
    steps, right_axis = [line["step"] for line in lines], axis.twinx()
    axis.plot(steps, [line["loss"] for line in lines], label="loss (left)")
    right_axis.plot(steps, [line["abs_log_ratio"] for line in lines], color="C1", label="mean |log ratio| (right)")
    drift = [(line["step"], line["drift"]) for line in lines if "drift" in line]
    if drift:
        right_axis.plot(*zip(*drift), ".-", color="C2", label="the same on filtered-out states (right)")
    for side in (axis, right_axis):
        side.set_ylim(0, 1.3 * side.get_ylim()[1])  # room for the legend
    axis.legend(handles=[*axis.lines, *right_axis.lines], loc="upper right")


def draw_curve(axis, curve):
    axis.set(title="One wrong solution, state by state", ylim=(-0.03, 1.03), ylabel="probability of a right answer")
    if curve is None:
        return axis.text(0.5, 0.5, "no wrong solution with values in this run", ha="center", transform=axis.transAxes)
    tree, nodes, v = curve
    texts = [tree["nodes"][node]["text"].strip() for node in nodes[1:]]
    labels = [tree["nodes"][node].get("value") for node in nodes[:-1]]
    axis.plot(v, "o-", label="V (critic)")
    axis.plot([np.nan if label is None else label for label in labels], "x--", color="grey", label="Monte-Carlo")
    if len(v) > 1:
        mistake = int(np.argmax(v[:-1] - v[1:])) + 1
        axis.plot([mistake - 1, mistake], v[mistake - 1:mistake + 1], color="C3", linewidth=4, alpha=0.6,
                  label="largest fall")
    shorten = lambda text: text if len(text) <= 28 else text[:27] + "…"
    axis.set_xticks(range(len(v)), ["(prompt)"] + [shorten(text) for text in texts[:len(v) - 1]],
                    rotation=30, ha="right")
    prompt = shorten(tree["problem"].replace("\n", " "))
    answer = "tests" if is_code(tree["answer"]) else tree["answer"]
    axis.set_title(f"One wrong solution of {prompt} (answer: {answer}), state by state", parse_math=False)
    for label in axis.get_xticklabels():
        label.set_parse_math(False)
    axis.legend(loc="lower left")


# ---------------------------------------------------------------------------------------------------------------------
# The stage

def named_models(given, run):
    """{name: folder} from name=path arguments; by default the run's policy and actor."""
    if not given:
        generate, actor = stage_record(run, "generate"), stage_record(run, "train_actor")
        if actor["inputs"]["policy"] != generate["inputs"]["policy"]:
            raise UserError(f"{run / 'actor'}: was trained on the data of another policy ({actor['inputs']['policy']}) "
                            f"than {run / 'generate.json'} names ({generate['inputs']['policy']}): run train_actor.py "
                            "with --overwrite, or name --models")
        given = [f"ref={generate['model']}", f"actor={run / 'actor'}"]
    models = {}
    for argument in given:
        name, equals, path = argument.partition("=")
        if not equals or not name or name in models:
            raise UserError(f"--models {argument}: each must be name=path, with names that differ")
        models[name] = find_model(path)
    return models


def steps_of_critic(critic):
    """label.py's delimiter and max_states for the trees that a critic was fitted to; the defaults for one that does not
    lie in its run."""
    settings = stage_record(critic.parent, "label")["settings"] if (critic.parent / "label.json").exists() else {}
    return [settings.get("delimiter", "\n"), settings.get("max_states") or math.inf]


def make_requests(name, folder, problems, args):
    """The greedy and the sampled request of every problem to one model."""
    tokenizer = load_tokenizer(folder)
    for problem in problems:
        _, ids = render_prompt(tokenizer, problem, args.system)
        kinds = [("greedy", 1, 0.0, 1.0)] + [("sampled", args.n, args.temperature, args.top_p)] * (args.n > 0)
        for kind, n, temperature, top_p in kinds:
            yield Request(f"evaluate/{kind}/{problem['id']}", {"model": name, "id": problem["id"], "kind": kind},
                          problem, ids, [], n, args.max_tokens, temperature, top_p, args.seed)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_flags(parser)
    parser.add_argument("--test", metavar="FILE", help="data file to import as RUN/test.jsonl")
    add_problem_flags(parser)
    parser.add_argument("--models", nargs="+", metavar="NAME=PATH", help="the policies, folders or names on the hub; "
                        "the paired tests take the first two (default: ref=<the run's policy> actor=RUN/actor)")
    parser.add_argument("--n", type=bounded(int, above=-1), default=0,
                        help="samples a problem beside the greedy answer (default: %(default)s)")
    parser.add_argument("--k", type=bounded(int), nargs="+", help="k of pass@k and maj@k (default: 1 and n)")
    parser.add_argument("--critic", help="best-of-n by this critic, a folder")
    parser.add_argument("--temperature", type=bounded(float, at_most=2), default=1.0,
                        help="of the samples (default: %(default)s)")
    parser.add_argument("--top-p", type=bounded(float, at_most=1), default=1.0,
                        help="of the samples (default: %(default)s)")
    parser.add_argument("--max-tokens", type=bounded(int), default=2048,
                        help="token limit of an answer (paper: %(default)s)")
    add_engine_flags(parser)
    args = parser.parse_args()
    args.k = args.k or sorted({1, args.n} if args.n else ())
    if args.k and max(args.k) > args.n:
        raise UserError(f"--k {max(args.k)}: pass@k needs n >= k samples, and --n is {args.n}")
    if args.critic and not args.n:
        raise UserError("--critic: best-of-n needs samples: give --n")
    return args


def main():
    args = parse_args()
    quiet_libraries()
    team = Team(args.tensor_parallel)
    models = named_models(args.models, args.run)
    args.run.mkdir(parents=True, exist_ok=True)
    test, answers_path = args.run / "test.jsonl", args.run / "answers.jsonl"
    critic, summary = args.critic and find_model(args.critic), None
    steps_like = critic and steps_of_critic(critic)
    if team.rank == 0:
        left_out = import_problems(args.test, test, "evaluate", args.overwrite, args.skip_bad)
        settings = {name: getattr(args, name)
                    for name in ("n", "k", "system", "temperature", "top_p", "max_tokens", "seed")}
        settings["models"] = list(models)
        inputs = {"test.jsonl": file_hash(test), **{f"model {name}": model_hash(path) for name, path in models.items()},
                  "critic": critic and model_hash(critic), "critic's steps": critic and repr(steps_like)}
        outputs = [args.run / name for name in ("answers.jsonl", "report.json", "report.md", "report.png")]
        summary = start_stage(args.run, "evaluate", settings, inputs, outputs, args.overwrite)
        keep_in_record(args.run, "evaluate", left_out=left_out)
    if summary := team.share("summary", summary):
        return team.rank > 0 or print_complete("evaluate", summary)

    problems = load_problems(test)
    jobs = [(folder, list(make_requests(name, folder, problems, args))) for name, folder in models.items()]
    sample_stage("evaluate", jobs, answers_path, ["model", "id", "kind"], "answers", args, team)
    answers = defaultdict(dict)  # {(model, kind): {id: [answer, ...]}}
    for _, line in read_jsonl(answers_path):
        answers[line["model"], line["kind"]][line["id"]] = line["answers"]
    values = critic and end_values(critic, models, problems, {name: answers[name, "sampled"] for name in models},
                                   args.system, steps_like)
    if team.rank > 0:
        return
    greedy, sampled = ({name: [answers[name, kind][problem["id"]] for problem in problems if answers[name, kind]]
                        for name in models} for kind in ("greedy", "sampled"))
    report = {"problems": len(problems), "rows left out": left_out, "models": {}}
    vote = not any(is_code(problem["answer"]) for problem in problems)
    for name, folder in models.items():
        ends = [values[name][problem["id"]] for problem in problems] if critic else None
        report["models"][name] = {"path": str(folder), "weights": model_hash(folder),
                                  **score_model(greedy[name], sampled[name], ends, args.k, vote)}
    if len(models) > 1:
        report["paired"] = compare(list(models)[:2], greedy, sampled)
    report["costs"] = stage_costs(args.run)
    write_json(args.run / "report.json", report)
    with whole_file(args.run / "report.md") as file:
        file.write("\n".join(report_lines(report)) + "\n")
    draw(report, args.run, args.run / "report.png")
    print("\n" + "\n".join(report_lines(report)[2:]))
    finish_stage(args.run, "evaluate", {"answers": str(answers_path), "report": str(args.run / "report.md"),
                                        "picture": str(args.run / "report.png")})


if __name__ == "__main__":
    run_stage(main)
