"""The ledger: which number of which page comes from which csv. tests/test_pages.py reads it.

Sentences and headings are free. A number that is a result is checked in one of four ways:

1. An interval, "0.07 [0.04, 0.11]", in any page: it must be the difference of two arms (`intervals`). If the
   number links to a line of a csv, [+0.07](../lab/differences.csv#L3), it must be the one of this line.
2. A mean with half of its interval, "0.76 ± 0.02", in any page: it must be the one of an arm (`halves`).
3. A column of a table in lab/NAME/README.md whose head is a column of the csv in code font, `judge`: each
   cell must be the mean of the arm that its row names, "GRPO: offline" or "offline". So a new column needs no
   code.
4. Any other number: an entry in CLAIMS. Write a function that computes the words from a csv, as below, and
   add Claim("docs/results.md", "stories.csv", function). A claim holds if its page has all of its words,
   each as often as all claims on this page ask for, beside the intervals and means of 1 and 2. "0.65" may
   be "65%", too.
"""

import re
from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from lab import compare
from lab.compare import before_training, path_of, read, scores

HUMANLINE = "offline + humanline"
PAPERS = ("humanline, paper's ε and β", "offline, paper's ε and β")
TUNED_BETA = ("humanline, tuned β", "offline, no clip, tuned β")
STUDIES = ("instances", "tasks", "stories", "baselines", "stories and baselines", "hypo", "controls", "sums")
STUDIES += ("gap", "clipping", "parity", "syncing", "dpo", "stale", "chat", "rate")
MINIATURES = ("figure1", "figure5", "figure5_dpo", "figure6", "figure7", "figure8", "figure10", "table6")
MEASURED = ("judge", "eval/reward", "eval/accuracy", "curve", "late", "kl", "finished", "trigrams", "fluency")
MEASURED += ("eval/accuracy@16", "eval/accuracy@32", "eval/loss", "eval/length", "eval/finished", "clipped")

# The planned tests whose p-values a page has: {study: [(group, first, second)]}, or (group, first, second,
# metric); with a margin after these four, a test of equivalence.
PLANNED = {
    "sums": [
        ("sums", "humanline", "ε 0.2"),
        ("sums", "humanline", "no clip"),
        ("sums", "online", "humanline"),
    ],
    "rate": [
        ("game, lr 3e-4", "humanline", "no clip", "curve"),
        ("game, lr 3e-4", "clipping alone, no ε", "no clip", "curve"),
        ("game, lr 1e-4", "humanline, no ε", "no clip", "curve", 0.02),
        ("DPO, lr 3e-4", "humanline", "syncing alone", "judge"),
        ("DPO, lr 1e-3", "humanline", "syncing alone", "judge"),
    ],
}


class Claim(NamedTuple):
    page: str
    source: str  # csv
    words: Callable[[], list[str]]  # the numbers as they are written


def written(places: int, *values: float) -> list[str]:
    """Writes numbers with so many places and a true minus."""
    return [f"{value + 1e-9:.{places}f}".replace("-", "−") for value in values]


def powers(*values: float) -> list[str]:
    """Writes numbers as 3e-7, and 0 as 0."""
    return [f"{value:.0e}".replace("e-0", "e-") if value else "0" for value in values]


# === Generic numbers of a study ===
@cache
def tables(study: str) -> list[tuple[str, str, pd.DataFrame]]:
    """Returns (group, metric, scores) of all groups and metrics that are measured in a study."""
    rows = read(study)
    metrics = [metric for metric in MEASURED if metric in rows and rows[metric].notna().any()]
    return [
        (group, metric, scores(study, group, metric))
        for group, metric in product(rows.group.unique(), metrics)
    ]


@cache
def differences(study: str) -> list[tuple]:
    """Returns (mean, low, high) of all pairs of arms, in both directions."""
    found = []
    for _, _, table in tables(study):
        for a, b in combinations(table, 2):
            if table.index.name == "instance":
                leads = table[a] - table[b]
                mean, half = leads.mean(), compare.half_interval(leads)
            else:
                test = stats.ttest_ind(table[a].dropna(), table[b].dropna(), equal_var=False)
                mean, half = table[a].mean() - table[b].mean(), np.ptp(test.confidence_interval()) / 2
            if np.isfinite(half):
                found += [(mean, mean - half, mean + half), (-mean, -mean - half, -mean + half)]
    return found


@cache
def halves(study: str) -> list[tuple]:
    """Returns (mean, half of its interval) of all arms."""
    found = []
    for _, _, table in tables(study):
        found += [(values.mean(), compare.half_interval(values)) for _, values in table.items()]
    return found


def p_values(study: str) -> list[float]:
    """Returns the p-values of the planned tests, with Holm's correction."""
    lines = [compare.difference(study, *test) for test in PLANNED[study]]
    p = [line.p if len(test) < 5 else line.p_equivalent for test, line in zip(PLANNED[study], lines)]
    return compare.holm(p)


# === Differences that are not of two arms of one study ===
def effects(*without: str) -> list[tuple]:
    """Returns the main effects of syncing, clipping and ε in `syncing`, by least squares."""
    rows = read("syncing")
    rows = rows[(rows.arm != "k=1") & ~rows.arm.isin(without)]
    parts = rows.arm.str.split(", ", expand=True)
    columns = [parts[0] == "k=16", parts[1] == "clip", parts[2] == "ε 0.5", parts[2] == "ε 2"]
    X = np.column_stack([np.ones(len(rows)), *columns]).astype(float)
    y = rows.judge.to_numpy()
    weights, *_ = np.linalg.lstsq(X, y, rcond=None)
    freedom = len(y) - X.shape[1]
    errors = np.sqrt(np.diag(np.linalg.inv(X.T @ X)) * ((y - X @ weights) ** 2).sum() / freedom)
    half = stats.t.ppf(0.975, freedom) * errors
    return [*zip(weights, weights - half, weights + half)][1:]


def pooled_syncing() -> tuple:
    """Returns what syncing is worth at ε 0.15, with and without clipping together."""
    rows = read("syncing")
    rows = rows[rows.arm.str.endswith("ε 0.15")]
    synced = rows.arm.str.startswith("k=16")
    return compare.welch(rows[synced].judge, rows[~synced].judge)


def leads_of_clipping(study: str, panels: list[str]) -> list[pd.Series]:
    """Returns clipping − no clipping, paired by seed, for each panel and for the mean of all."""
    tables = [scores(study, panel) for panel in panels]
    leads = [table["clipping"] - table["no clipping"] for table in tables]
    return [*leads, sum(leads) / len(leads)]


def worst_quarter(arm_scores: np.ndarray) -> np.ndarray:
    """Returns the mean of the lowest quarter of the scores along the last axis."""
    return np.sort(arm_scores)[..., : arm_scores.shape[-1] // 4].mean(-1)


def worst_quarters(group: str, first: str, second: str) -> tuple:
    """Compares each arm's own worst quarter of `tasks`, by a bootstrap over tasks with both arms' scores."""
    arms = [scores("tasks", group)[arm].to_numpy() for arm in (first, second)]
    drawn = np.random.default_rng(0).integers(20, size=(20_000, 20))
    draws = worst_quarter(arms[0][drawn]) - worst_quarter(arms[1][drawn])
    return worst_quarter(arms[0]) - worst_quarter(arms[1]), *np.quantile(draws, (0.025, 0.975))


def score_at(row: pd.Series, nats: float) -> float:
    """Returns the judge's score of a run of `stories` when it first reached a KL, between two checkpoints."""
    steps = range(0, 121, 15)
    for step, following in zip(steps, steps[1:]):
        if row[f"kl@{following}"] >= nats:
            kls = [row[f"kl@{step}"], row[f"kl@{following}"]]
            return np.interp(nats, kls, [row[f"judge@{step}"], row[f"judge@{following}"]])
    return np.nan


def at_equal_distance() -> tuple:
    """Compares GRPO's arms of `stories` at a KL of 5 nats."""
    rows = read("stories").query("group == 'GRPO'")
    rows = rows.assign(score=rows.apply(score_at, axis=1, nats=5))
    table = rows.pivot(index="instance", columns="arm", values="score")
    return compare.paired((table[HUMANLINE] - table["offline"]).dropna())


def gain_of_the_last_steps() -> tuple:
    """Returns by how much more humanline gains than ε 0.2 from step 16 to step 32 of `sums`."""
    gains = scores("sums", "sums", "eval/accuracy@32") - scores("sums", "sums", "eval/accuracy@16")
    return compare.paired(gains["humanline"] - gains["ε 0.2"])


def at_equal_shares() -> tuple:
    """Returns GRPO's lead on stories at equal shares of texts that end, and half of its interval."""
    judge, ended = (scores("baselines", "GRPO", column) for column in ("judge", "finished"))
    lead, more = (table[TUNED_BETA[0]] - table[TUNED_BETA[1]] for table in (judge, ended))
    fit = stats.linregress(more, lead)
    return fit.intercept, fit.intercept_stderr * stats.t.ppf(0.975, len(lead) - 2)


def games_at_a_high_rate() -> pd.DataFrame:
    """Returns the tuning scores of `controls` at 3e-4, by seed and arm (one game)."""
    rows = read("controls", "tuning")
    return rows[rows.lr == 3e-4].pivot_table("curve", "seed", "arm")


@cache
def special_halves() -> list[tuple]:
    """Returns (mean, half of its interval) of means that are not an arm's."""
    table = games_at_a_high_rate()
    lead = table["humanline, k=16"] - table["no clip"]
    return [at_equal_shares(), (lead.mean(), compare.half_interval(lead))]


@cache
def special_intervals() -> list[tuple]:
    """Returns (mean, low, high) of the differences above, in both directions."""
    rates = leads_of_clipping("clipping", ["lr 2e-3", "lr 4e-3"])
    rates += leads_of_clipping("figure5_dpo", ["DPO on tales, lr 3e-4", "DPO on tales, lr 1e-3"])
    found = [compare.paired(leads) for leads in rates]
    for group in ("KTO", "GRPO"):  # without the task that gives three fifths of the lead
        table = scores("instances", group).drop("4")
        found.append(compare.paired(table[HUMANLINE] - table["offline"]))
    found += effects() + effects("k=16, clip, ε 2") + [pooled_syncing()]
    found += [
        worst_quarters("GRPO", HUMANLINE, arm) for arm in ("offline", "offline, ε 0.5", "offline, no clip")
    ]
    found.append(worst_quarters("KTO", HUMANLINE, "offline"))
    found += [gain_of_the_last_steps(), at_equal_distance()]
    found = [(mean, low, high) for mean, low, high, *_ in found]
    return found + [(-mean, -high, -low) for mean, low, high in found]


@cache
def intervals() -> np.ndarray:
    """Returns (mean, low, high) of all differences, (N, 3)."""
    found = [line for study in (*STUDIES, *MINIATURES) for line in differences(study)]
    return np.array(found + special_intervals())


# === Numbers that need a function of their own ===
def real_run() -> list[str]:
    curves = pd.read_csv(path_of("real_run")).pivot(index="step", columns="seed", values="accuracy")
    return written(2, curves.iloc[0].mean(), curves.iloc[-1].mean(), *curves.iloc[-1])


def signed_sentences() -> list[str]:
    """Returns the numbers of the five sentences of docs/results.md."""
    leads = []
    for study, group, pair in (
        ("baselines", "GRPO", PAPERS),
        ("baselines", "KTO", PAPERS),
        ("controls", "game", ("humanline, k=16", "ε 0.2")),
    ):
        table = scores(study, group)
        leads.append(table[pair[0]] - table[pair[1]])
    wins = sum((lead > 0).sum() for lead in leads)
    assert wins == sum(map(len, leads)) == 30  # "all thirty comparisons"
    means = [lead.mean() for lead in leads]
    ends = ends_of_the_games()
    behind = ends["S = 1"] - ends["humanline, k=16"]
    over_training = -compare.difference("controls", "game", "humanline, k=16", "S = 1").mean
    return [
        *written(2, min(means), max(means), over_training),
        *written(3, behind),
        *[f"{float(share):.0%}" for share in recovered_accuracy()[:2]],
    ]


def ends_of_the_games() -> pd.Series:
    """Returns the mean accuracy at the end of `controls`, by arm."""
    return scores("controls", "game", "eval/accuracy").mean()


def end_behind_no_clip() -> list[str]:
    ends = ends_of_the_games()
    return written(3, ends["no clip"] - ends["humanline, k=16"])


def chat_means(phase: str, pairs: str, arm: str, lr: float) -> list[str]:
    """Returns loss, accuracy and KL, means over seeds."""
    rows = read("chat", phase).query("panel == @pairs and arm == @arm and lr == @lr")
    loss, accuracy, kl = rows[["eval/loss", "eval/accuracy", "kl"]].mean()
    return [*written(2, loss, accuracy), *written(0, abs(kl))]


def minutes_of_chat() -> list[str]:
    minutes = read("chat", "").query("panel == 'chat polite'").seconds / 60
    return written(0, minutes.min(), minutes.max())


def ends_of_the_default_run() -> list[str]:
    """Returns the rewards at which DPO's offline run and default run end."""
    rows = pd.read_csv(path_of("learning")).query("script == 'dpo' and step == 320")
    return written(3, *rows.groupby("arm").score.mean()[["offline, lr 3e-3", "humanline"]])


def ends_of_kto() -> list[str]:
    rows = pd.read_csv(path_of("learning")).query("script == 'kto' and arm == 'humanline' and step == 320")
    return written(2, rows.score.min(), rows.score.max())


def before_tales() -> list[str]:
    return written(2, before_training("parity", "GRPO", "judge"))


def seeds_without_a_clip() -> list[str]:
    return written(2, *sorted(games_at_a_high_rate()["no clip"]))


def tests_of_rate() -> list[str]:
    """Returns Holm's p-values of the five tests."""
    corrected = p_values("rate")
    return [*powers(corrected[0]), *written(2, *corrected[1:4]), *written(3, corrected[4])]


def untuned_leads() -> list[str]:
    """Returns by how much humanline was behind no clip in games, and behind syncing alone in DPO."""
    tests = PLANNED["rate"][0], PLANNED["rate"][4]
    return written(2, *[-compare.difference("rate", *test).mean for test in tests])


def games_at_two_rates() -> list[str]:
    """Returns how much more no clip of `rate` scores at 3e-4 than at 1e-4, and how much less at the end."""
    low, high = (scores("rate", f"game, lr {rate}") for rate in ("1e-4", "3e-4"))
    ends = [scores("rate", f"game, lr {rate}", "eval/accuracy")["no clip"] for rate in ("1e-4", "3e-4")]
    more, less = high["no clip"] - low["no clip"], ends[0] - ends[1]
    behind = [(table["humanline"] < table["no clip"]).sum() for table in (low, high)]
    assert behind == [9, 10] and (more > 0).sum() == (less > 0).sum() == 9  # the page says so
    return written(3, more.mean(), less.mean())


def recovered_accuracy() -> list[str]:
    """Returns the shares of the final accuracy that old samples cost which three arms recover."""
    ends = ends_of_the_games()
    arms = ["humanline, k=16", "no clip", "syncing alone, k=16"]
    return written(2, *(ends[arms] - ends["ε 0.2"]) / (ends["S = 1"] - ends["ε 0.2"]))


def largest_fall() -> list[str]:
    """Returns the largest fall of a humanline run of `controls` below its best evaluation so far."""
    rows = read("controls").query("arm == 'humanline, k=16'")
    curves = rows[[f"eval/accuracy@{step}" for step in range(32, 257, 32)]].T
    return written(2, (curves.cummax() - curves).max().max())


def times() -> list[str]:
    """Returns the medians of the seconds of `time`: of all steps, and to online's score at half its steps."""
    table = pd.read_csv(path_of("time"))
    words, ends = [], {}
    for (panel, arm), rows in table.groupby(["panel", "arm"]):
        online = table[(table.panel == panel) & table.arm.isin(("S = 1", "online"))]
        target = online.score[online.step == online.step.max() // 2].mean()
        reached = rows[rows.score >= target].groupby("seed").seconds.min()
        ends[panel, arm] = rows.groupby("seed").seconds.max().median()
        if arm in ("online", "S = 1") or "offline + humanline" in arm and (panel, arm[-2:]) != ("GRPO", "16"):
            words += written(1, ends[panel, arm], reached.median())
    words += written(1, ends["S = 64", "humanline, k=16"])
    for script in ("GRPO", "KTO"):
        words += written(2, ends[script, "offline + humanline, k=32"] / ends[script, "online"])
    return words


def leads_at_checkpoints() -> list[str]:
    """Returns GRPO's lead on stories at step 60 and at the end."""
    leads = []
    for step in (60, 120):
        table = scores("stories", "GRPO", f"judge@{step}")
        leads.append((table[HUMANLINE] - table["offline"]).mean())
    return written(3, *leads)


def first_and_last_accuracy() -> list[str]:
    """Returns the means before and after training, and the least and the largest end of three seeds."""
    before, after, *ends = real_run()
    return [before, after, min(ends), max(ends)]


def shares_that_the_clip_met() -> list[str]:
    """Returns the shares of tokens beyond ±1.5 of humanline, in the rows of the table of differences."""
    table = pd.read_csv(compare.LAB / "differences.csv")
    rows = table.row[table.column != "online"].unique()
    shares = [scores("baselines", "KTO", "clipped")[PAPERS[0]].mean()]  # the default's column
    for row in rows:
        line = table[(table.row == row) & (table.column == "control")].iloc[0]
        arm = HUMANLINE if line.runs == "stories and baselines" else line["first"]
        shares.append(scores(line.runs, line.panel, "clipped")[arm].mean())
    return powers(*shares)


def distinct_trigrams() -> list[str]:
    """Returns the shares of distinct trigrams of `stories`, KTO's and DPO's: online, and with humanline."""
    shares = [scores("stories", group, "trigrams").mean() for group in ("KTO", "DPO")]
    return [f"{share[arm]:.0%}" for arm in ("online", HUMANLINE) for share in shares]


def wins_of_other_tasks() -> list[str]:
    """Returns on how many tales and kinds GRPO, and on how many stories DPO, are above the default."""
    words = []
    for study, group, pair in (
        ("tasks", "GRPO", (HUMANLINE, "offline, ε 0.5")),
        ("sums", "sums", ("humanline", "ε 0.2")),
        ("stories and baselines", "DPO", (HUMANLINE, "offline, paper's ε and β")),
    ):
        table = scores(study, group)
        words += [str((table[pair[0]] > table[pair[1]]).sum()), str(len(table))]
    k1 = scores("baselines", "DPO")
    return [*words, str((k1[PAPERS[0]] > k1[PAPERS[1]]).sum())]


def tuned_settings() -> list[str]:
    """Returns the numbers of tuned settings of KTO and DPO on stories, humanline's first."""
    counts = read("stories", "tuning").groupby(["panel", "arm"]).size()
    return [str(counts[panel, arm]) for panel in ("KTO 1", "DPO 1") for arm in (HUMANLINE, "offline")]


def losses_of_chat() -> list[str]:
    """Returns the losses of `chat`, polite pairs: plain DPO, k = 16 and k = 1, each at its best rate."""
    best = (("offline", 1e-4), ("humanline, k=16", 2e-5), ("humanline, k=1", 2e-5))
    return [chat_means("reported", "chat polite", *arm)[0] for arm in best]


def distances_of_the_tuned_arms() -> list[str]:
    """Returns nats and shares of ended texts of GRPO's humanline and control, both with a tuned β."""
    kl, ended = (scores("baselines", "GRPO", metric)[[*TUNED_BETA]].mean() for metric in ("kl", "finished"))
    return [*written(0, *kl), *written(2, *ended)]


def papers_kto_and_dpo() -> list[str]:
    """Returns KTO's score with the paper's β, and by how much DPO's k = 1 is behind the default."""
    behind = -compare.difference("baselines", "DPO", *PAPERS).mean
    return [*written(3, scores("baselines", "KTO")[PAPERS[0]].mean()), *written(2, behind)]


def cost_at_step_32() -> list[str]:
    """Returns online − ε 0.2 at step 32 with S = 16 and with S = 32."""
    tables = [scores(study, "sums", "eval/accuracy@32") for study in ("sums", "gap")]
    return written(3, *[(table["online"] - table["ε 0.2"]).mean() for table in tables])


def chat_of_polite_pairs() -> list[str]:
    """Returns the table of measured runs: the report, and 5e-6 and offline's 2e-5 of the tuning."""
    words = []
    for arm in ("offline", "humanline, k=1", "humanline, k=16"):
        words += chat_means("reported", "chat polite", arm, 1e-4 if arm == "offline" else 2e-5)
    for arm in ("offline", "humanline, k=16"):
        words += chat_means("tuning", "chat polite", arm, 5e-6)
    return words + chat_means("tuning", "chat polite", "offline", 2e-5)


def ten_steps_of_dpo() -> list[str]:
    """Returns the accuracy before training, log 2, and the accuracy after ten steps at 5e-6."""
    rows = pd.read_csv(path_of("first_run")).query("metric == 'eval/accuracy'")
    after = rows[rows.command.str.contains("--num-steps 10")].after
    return [*written(2, np.log(2), 0.5), *written(3, *after)]


def ends_of_the_first_command() -> list[str]:
    """Returns the least and the largest reward of README's command, three seeds and two processors."""
    rows = pd.read_csv(path_of("first_run")).query("metric == 'eval/reward'")
    after = rows[rows.command.str.startswith("torchrun grpo_humanline.py --k 16")].after
    return written(2, after.min(), after.max())


def k_of_dpo() -> list[str]:
    """Returns DPO's scores on stories: k = 16 and 1 at 3e-4, k = 1 at 1e-4, and tuned offline."""
    found, baselines = (scores(study, "DPO").mean() for study in ("stories", "baselines"))
    low = baselines["humanline, paper's β, k = 1's rate"]
    return written(2, found[HUMANLINE], baselines[PAPERS[0]], low, found["offline"])


def largest_share_of_the_clip() -> list[str]:
    """Returns the largest share of clipped tokens in rows of differences.csv where humanline is ahead."""
    table = pd.read_csv(compare.LAB / "differences.csv")
    return [f"{table[table.low > 0].clipped.max():.0%}"]


def cost_of_old_games() -> list[str]:
    ends = ends_of_the_games()
    return written(3, ends["ε 0.2"] - ends["S = 1"])


def trust_region() -> list[str]:
    both = [
        compare.difference("figure10", group, "trust region", HUMANLINE).mean for group in ("DPO", "GRPO")
    ]
    return [*written(3, both[0]), *written(4, both[1])]


def ranges_of_default_runs() -> list[str]:
    """Returns least and most of the runs in the table of docs/curves.md: reward, accuracy, clipped."""
    words = []
    for group in ("DPO", "KTO", "GRPO"):
        runs = read("figure1").query("group == @group and arm == @HUMANLINE")
        for metric, places in (("eval/reward", 2), ("eval/accuracy", 3), ("clipped", 3)):
            if (group, metric) != ("DPO", "clipped"):
                words += written(places, runs[metric].min(), runs[metric].max())
    runs = read("stale").query("arm == 'humanline, k=16'")
    for metric, places in (("eval/accuracy", 3), ("clipped", 4)):
        words += written(places, runs[metric].min(), runs[metric].max())
    return words


RESULTS, FIRST, REPLICATION = "docs/results.md", "docs/first_run.md", "docs/replication.md"
CONTROLS = "lab/controls/README.md"
CLAIMS = [
    Claim("README.md", "baselines.csv, controls.csv", lambda: signed_sentences()[:4]),
    Claim("README.md", "real_run.csv", first_and_last_accuracy),
    Claim("README.md", "first_run.csv", ends_of_the_first_command),
    Claim(RESULTS, "baselines.csv, controls.csv", signed_sentences),
    Claim(RESULTS, "differences.csv", largest_share_of_the_clip),
    Claim(RESULTS, "the csvs of differences.csv", shares_that_the_clip_met),
    Claim(RESULTS, "stories.csv", distinct_trigrams),
    Claim(RESULTS, "tasks.csv, sums.csv, stories.csv", wins_of_other_tasks),
    Claim(RESULTS, "stories.csv, the tuning", tuned_settings),
    Claim(RESULTS, "chat.csv", losses_of_chat),
    Claim(RESULTS, "baselines.csv", distances_of_the_tuned_arms),
    Claim(RESULTS, "baselines.csv", papers_kto_and_dpo),
    Claim(RESULTS, "controls.csv", end_behind_no_clip),
    Claim(RESULTS, "sums.csv", lambda: written(2, p_values("sums")[2])),
    Claim(RESULTS, "sums.csv, gap.csv", cost_at_step_32),
    Claim(RESULTS, "controls.csv", lambda: recovered_accuracy()[2:]),
    Claim(FIRST, "chat.csv", chat_of_polite_pairs),
    Claim(FIRST, "first_run.csv", ten_steps_of_dpo),
    Claim("docs/curves.md", "first_run.csv", ends_of_the_first_command),
    Claim(FIRST, "chat.csv", minutes_of_chat),
    Claim("docs/dpo.md", "stories.csv, baselines.csv", k_of_dpo),
    Claim("docs/dpo.md", "learning.csv", ends_of_the_default_run),
    Claim("docs/kto.md", "learning.csv", ends_of_kto),
    Claim("docs/grpo.md", "untrained.csv", before_tales),
    Claim("docs/grpo_math.md", "real_run.csv", real_run),
    Claim("docs/grpo_math.md", "controls.csv", end_behind_no_clip),
    Claim("docs/curves.md", "figure1.csv, stale.csv", ranges_of_default_runs),
    Claim("docs/curves.md", "learning.csv", ends_of_the_default_run),
    Claim(REPLICATION, "stories.csv", leads_at_checkpoints),
    Claim(REPLICATION, "controls.csv", lambda: recovered_accuracy()[:2]),
    Claim(REPLICATION, "controls.csv", cost_of_old_games),
    Claim(REPLICATION, "time.csv", lambda: times()[-2:]),
    Claim(REPLICATION, "figure10.csv", trust_region),
    Claim("lab/chat/README.md", "log 2", lambda: written(3, np.log(2))),
    Claim(CONTROLS, "controls.csv, the tuning", seeds_without_a_clip),
    Claim(CONTROLS, "controls.csv", recovered_accuracy),
    Claim(CONTROLS, "controls.csv", largest_fall),
    Claim("lab/rate/README.md", "rate.csv", games_at_two_rates),
    Claim("lab/rate/README.md", "rate.csv", tests_of_rate),
    Claim(RESULTS, "rate.csv", tests_of_rate),
    Claim("README.md", "rate.csv", untuned_leads),
    Claim("docs/humanline.md", "rate.csv", lambda: untuned_leads()[1:]),
    Claim("lab/time/README.md", "time.csv", times),
]


# === What the test asks ===
NUMBER = r"[−+]?\d*\.\d+"
INTERVAL = rf"({NUMBER})\S* \[({NUMBER}), ({NUMBER})\]"  # a difference and its 95% interval
HALF = rf"({NUMBER}) ± ({NUMBER})"  # a mean and half of its interval


def plain(text: str) -> str:
    """Returns a page's text without code, targets of links and emphasis, and with single spaces."""
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`|\]\([^)\s]*\)|^\[[^]\n]+\]: [^\n]*$|[*\\]", "", text, flags=re.M | re.S
    )
    return " ".join(text.replace("[[", "[").split())
