"""Computes the tables, the tests and the picture of the study from its rows.

    python -m lab.frontier.report  # prints tables and tests, draws frontier.png, and adds rows to the board

The tables are in Markdown, with the names of their numbers (lab/numbers.py).

An arm is read at the setting and the step that its tuning has chosen. The choice has a limit of the mean KL:
`near` is 20 nats, and `far` is no limit. The paper's own settings are read at their last step. An arm whose
twelve runs are not all there has a dash, and its test has no line.
"""

import hashlib
import subprocess
from functools import cache

import pandas as pd

from lab import board, compare, run
from lab.compare import plt
from lab.frontier import make
from lab.steps import METRICS, STEPS

DISTANCES = dict(zip(("near", "far"), board.LIMITS))
TITLES = {"near": "≤ 20 nats", "far": "any distance"}
# The arms of the picture, with their names there
LABELS = {"plain": "control", "sync only": "syncing alone", "both": "humanline", "online": "online"}
FIXED = ("plain", "sync only", "both")  # the arms on fixed data that test D compares with online
TESTS = {  # {letter: (first arm, second arm, distance)}
    "A": ("sync only", "plain", "near"),
    "B": ("sync only", "plain", "far"),
    "C": ("both", "sync only", "far"),
    "D": ("online", "fixed", "far"),
}

# Further differences: {objective: [(arm and distance of the first, of the second, and a step of the second's
# setting if it is not the chosen one)]}. All but the paper's were chosen after the results were seen.
COMMON = [
    (("both", "near"), ("plain", "near"), 0),
    (("both", "far"), ("plain", "far"), 0),
    (("both", "far"), ("online", "far"), 0),
    (("paper, humanline", "far"), ("paper, plain", "far"), 0),
]
FURTHER = {
    "GRPO": [(("sync only", "near"), ("plain", "near"), 105), *COMMON],
    "KTO": [(("both", "near"), ("plain", "near"), 105), *COMMON],
    "DPO": [(("sync only", "far"), ("plain", "near"), 120), *COMMON],
}


@cache
def choice(objective: str, arm: str, distance: str) -> tuple[float, str, int]:
    """Returns (mean judge of the tuning draws, setting, step) of an arm's best setting and step."""
    if (objective, arm) in make.PAPER:
        return float("nan"), make.PAPER[objective, arm], STEPS[-1]
    tuned = make.rows_of(objective, arm, board.TUNING)
    return make.ranked(tuned, board.TUNING, DISTANCES[distance])[0]


def fixed(objective: str) -> str:
    """Returns the arm on fixed data that scored best in tuning, at any distance."""
    return max(FIXED, key=lambda arm: choice(objective, arm, "far"))


def metrics_at(objective: str, arm: str, words: str, step: int) -> pd.DataFrame:
    """Returns the metrics of a setting by draw, after a step. A run that broke has the untrained policy's."""
    rows = make.rows_of(objective, arm, board.REPORTED).query("words == @words").set_index("instance")
    return rows[[f"{metric}@{step}" for metric in METRICS]].set_axis(METRICS, axis=1).fillna(untrained())


@cache
def values(objective: str, arm: str, distance: str) -> pd.DataFrame:
    """Returns the metrics of an arm by draw, at its choice.

    The table is empty if runs are missing, or if the paper's own setting ends beyond the distance.
    """
    arm = fixed(objective) if arm == "fixed" else arm
    table = metrics_at(objective, arm, *choice(objective, arm, distance)[1:])
    beyond = (objective, arm) in make.PAPER and table.kl.mean() > DISTANCES[distance]
    return table[:0] if beyond or len(table) < len(board.REPORTED) else table


def untrained() -> pd.DataFrame:
    """Returns the metrics of the untrained policy by draw."""
    rows = pd.read_csv(make.FOLDER / "frontier.csv").query("arm == 'before training'")
    rows = rows.drop_duplicates("command", keep="last").set_index("instance")
    return rows[[f"{metric}@{STEPS[0]}" for metric in METRICS]].set_axis(METRICS, axis=1)


@cache
def tests() -> dict[tuple[str, str], tuple[compare.Difference, float, float]]:
    """Returns {(letter, objective): (difference, Holm's p, Holm's p of being on a par)}."""
    found = {}
    for letter, (first, second, distance) in TESTS.items():
        leads = {
            objective: values(objective, first, distance).judge - values(objective, second, distance).judge
            for objective in make.OBJECTIVES
        }
        if any(lead.count() < len(board.REPORTED) for lead in leads.values()):
            continue
        differences = [compare.paired(lead) for lead in leads.values()]
        p_values = compare.holm([one.p for one in differences])
        p_equivalent = compare.holm([one.p_equivalent for one in differences])
        for objective, *line in zip(leads, differences, p_values, p_equivalent):
            found[letter, objective] = tuple(line)
    return found


def draw():
    """Draws judge against KL over the steps, means over draws. Thin lines: the choices within 20 nats.

    A ring marks the step that tuning has chosen, a dotted one within 20 nats.
    """
    figure, axes = plt.subplots(1, 3, figsize=(10, 4.2), layout="constrained", sharey=True)
    before = untrained().judge.mean()
    for ax, objective in zip(axes, make.OBJECTIVES):
        for (arm, label), color in zip(LABELS.items(), compare.COLORS):
            for distance, width in (("far", 1.8), ("near", 0.7)):
                if values(objective, arm, distance).empty:
                    continue
                words = choice(objective, arm, distance)[1]
                means = [metrics_at(objective, arm, words, step).mean() for step in STEPS]
                kl, judge = ([one[metric] for one in means] for metric in ("kl", "judge"))
                line = "--" if arm == "both" else "-"  # GRPO's line lies on that of sync only
                style = {"color": color, "markersize": 2 * width, "linewidth": width, "linestyle": line}
                style["zorder"] = 3 if arm == "plain" else 2  # else the thin control lies under others
                name = label if distance == "far" else f"{label}, tuned within 20 nats"
                ax.plot([0, *kl], [before, *judge], marker="o", label=name, **style)
                at = STEPS.index(choice(objective, arm, distance)[2])
                ring = {"linestyle": ":" if distance == "near" else "-", "edgecolors": color}
                ax.scatter(kl[at], judge[at], s=80, zorder=4, facecolors="none", **ring)  # in the tests
        ax.plot(0, before, "s", color="0.5")
        ax.axvline(board.LIMITS[0], color="black", linestyle=":", linewidth=1)
        ax.set(title=objective, xlabel="KL from the initial policy, nats")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("mean score of the judge")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


@cache
def version_of(script: str, commit: str) -> str:
    """Returns the board's column `file`: the version of a script at the commit of a row."""
    show = ["git", "show", f"{commit}:{script}"]
    text = subprocess.run(show, cwd=run.ROOT, capture_output=True, check=True).stdout
    return hashlib.sha256(text).hexdigest()[:12]


def board_rows() -> pd.DataFrame:
    """Returns the rows of the study as rows of lab/board/board.csv."""
    names = {("all", "before training"): [make.UNTRAINED]}
    names |= {arm: make.settings(*arm) for arm in (*make.ARMS, *make.PAPER)}
    rows = pd.read_csv(make.FOLDER / "frontier.csv", dtype={"commit": str})
    rows = rows[rows[f"judge@{STEPS[-1]}"].notna()]  # a run that broke has no row there
    rows = rows.drop_duplicates("command", keep="last").set_index("command")
    found = []
    for (objective, arm), settings in names.items():
        tuning = () if (objective, arm) in make.PAPER else board.TUNING  # the paper's were not tuned
        for words in settings:
            for draw in (*tuning, *board.REPORTED):
                name = board.BEFORE if objective == "all" else f"{objective}, {arm}"
                line = board.plan(f"{words} {make.NORM}".split(), draw, name)
                if line["command"] in rows.index:
                    row = rows.loc[line["command"]].to_dict()
                    found.append(row | line | {"file": version_of(words.split()[0], row["commit"])})
    return pd.DataFrame(found).reindex(columns=board.COLUMNS)


def numbers() -> dict[str, tuple]:
    """Returns the numbers that pages link: means of an arm with their intervals, and the tests."""
    found = {}
    for objective, arm in (*make.ARMS, *make.PAPER):
        for distance in DISTANCES:
            name = f"frontier/{objective}/{arm}/{distance}"
            if (objective, arm) in make.ARMS:
                found[f"{name}/tuning"] = (choice(objective, arm, distance)[0],)
            table = values(objective, arm, distance)
            if len(table):
                found[f"{name}/least"] = (table.judge.min(),)
            for metric, column in table.items() if len(table) else ():
                half = compare.half_interval(column)
                mean = (column.mean(), column.mean() - half, column.mean() + half)
                found[f"{name}/{metric}"] = mean
    for (letter, objective), (difference, p, p_equivalent) in tests().items():
        found[f"frontier/{letter}/{objective}"] = tuple(difference)
        found |= {
            f"frontier/{letter}/{objective}/p": (p,),
            f"frontier/{letter}/{objective}/on a par": (p_equivalent,),
        }
    for objective, differences in FURTHER.items():
        for first, (arm, distance), step in differences:
            _, words, chosen = choice(objective, arm, distance)
            second = metrics_at(objective, arm, words, step or chosen)
            name = f"{arm} {distance}" + f", step {step}" * bool(step)
            lead = compare.paired(values(objective, *first).judge - second.judge)
            found[f"frontier/{objective}/{' '.join(first)} − {name}"] = tuple(lead)
            found[f"frontier/{objective}/{name}/kl"] = (second.kl.mean(),)
    return found | {
        f"frontier/before training/{metric}": (mean,) for metric, mean in untrained().mean().items()
    }


def link(shown: str, name: str) -> str:
    """Returns the link of a number; `python -m lab.numbers` adds its line."""
    return f'[{shown}](../numbers.csv "frontier/{name}")'


def cells(objective: str, arm: str, distance: str) -> list[str]:
    """Returns the metrics of an arm. The score is bold if its difference to plain's excludes zero."""
    table = values(objective, arm, distance)
    if table.empty:
        return ["–"] * len(METRICS)
    lead = table.judge - values(objective, "plain", distance).judge
    found = []
    for metric, mean in table.mean().items():
        shown = f"{mean:.0f}" if metric == "kl" else f"{mean:.2f}"
        if metric == "judge" and abs(lead.mean()) > compare.half_interval(lead):
            shown = f"**{shown}**"
        found.append(link(shown, f"{objective}/{arm}/{distance}/{metric}"))
    return found


def table_of_arms() -> list[list[str]]:
    """Returns the lines of the table: an arm's metrics for each distance."""
    lines = [["", *(f"{metric}, {title}" for title in TITLES.values() for metric in METRICS)]]
    lines.append(["---"] * len(lines[0]))
    arms = sorted((*make.ARMS, *make.PAPER), key=lambda one: make.OBJECTIVES.index(one[0]))
    for objective, arm in arms:
        both = [cell for distance in DISTANCES for cell in cells(objective, arm, distance)]
        lines.append([f"{objective}, {arm}", *both])
    return lines


def of_p(p: float) -> str:
    """Returns a p-value with two decimals or, below 0.01, as a power of ten."""
    return f"{p:.2f}" if p >= 0.01 or p == 0 else f"{p:.0e}".replace("e-0", "e-")


def table_of_tests() -> list[list[str]]:
    """Returns the lines of the table: a test's difference and Holm's p-values for each objective."""
    lines = [["", *make.OBJECTIVES], ["---"] * (1 + len(make.OBJECTIVES))]
    for letter, (first, second, distance) in TESTS.items():
        if (letter, make.OBJECTIVES[0]) not in tests():
            continue
        columns = []
        for objective in make.OBJECTIVES:
            found, p, p_equivalent = tests()[letter, objective]
            name = f"{letter}/{objective}"
            bold = "**" if p < 0.05 else ""
            interval = f"[{found.low:.3f}, {found.high:.3f}]"
            lead = f"{link(f'{bold}{found.mean:+.3f}{bold}', name)} {interval}".replace("-0.", "−0.")
            on_a_par = link(of_p(p_equivalent), f"{name}/on a par")
            best = f"{fixed(objective)}: " if second == "fixed" else ""
            columns.append(f"{best}{lead}, p = {link(of_p(p), f'{name}/p')}, on a par: {on_a_par}")
        lines.append([f"{letter}: {first} − {second}, {TITLES[distance]}", *columns])
    return lines


def table_of_choices() -> list[list[str]]:
    """Returns the lines of the table: the setting and the step of each arm's choices."""
    lines = [["", *TITLES.values()], ["---"] * 3]
    for objective, arm in make.ARMS:
        chosen = [choice(objective, arm, distance)[1:] for distance in DISTANCES]
        lines.append([f"{objective}, {arm}", *(f"`{words}`, step {step}" for words, step in chosen)])
    return lines


def main():
    make.check_complete("fixed")
    rows = pd.read_csv(make.FOLDER / "frontier.csv")
    for row in rows[rows[f"judge@{STEPS[-1]}"].isna()].itertuples():
        print(f"broken: {row.panel}, {row.arm}, draw {row.instance}: {row.failed}")
    for lines in (table_of_arms(), table_of_tests(), table_of_choices()):
        print("".join(f"| {' | '.join(columns)} |\n" for columns in lines))
    compare.save(draw(), make.FOLDER / "frontier.png")
    file = board.FOLDER / "board.csv"
    ours = board_rows()
    others = pd.read_csv(file, dtype={"commit": str, "file": str})
    others = others[~others.command.isin(ours.command)]
    pd.concat([others, ours] if len(others) else [ours]).to_csv(file, index=False)


if __name__ == "__main__":
    main()
