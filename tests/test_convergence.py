"""The convergence study trains what it says it trains, counts what is sent, and sums up rightly."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from powersgd.demo import build_net
from profiling import convergence, tasks
from profiling.convergence_tables import make_markdown, make_table
from profiling.curves import draw_ablation, draw_curves
from profiling.effects import Effect, Study
from profiling.tasks import TASKS
from profiling.training import PLAIN, Kind, Outcome, Point, Run, train

NET_BYTES = 4 * 151_306
# n + m elements at rank 1 for each of (32, 9), (64, 288), (128, 1024) and (10, 128), and the biases
RANK_1_BYTES = 4 * (41 + 352 + 1152 + 138 + (32 + 64 + 128 + 10))
BOTH = Kind(1)
NO_FEEDBACK = Kind(1, use_error_feedback=False)
COLD = Kind(1, warm_start=False)
NEITHER = Kind(1, use_error_feedback=False, warm_start=False)


def _run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(convergence.main)
    return CliRunner().invoke(app, list(arguments))


def _train_alone(steps: int, rates: list[float]) -> list[float]:
    """Train on whole batches in this process; return the test loss after each step."""
    torch.manual_seed(0)
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    images, labels = TASKS["digits"].held_out()
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * rates[step]
        optimizer.zero_grad()
        inputs, targets = TASKS["digits"].draw(0, step)
        cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(cross_entropy(net(images), labels).item())
    return losses


@pytest.mark.timeout(120)
def test_command_trains_as_one_process_would_and_counts_bytes(tmp_path: Path) -> None:
    save, plots = tmp_path / "new" / "all.json", tmp_path / "plots"
    options = ["--task", "digits", "--optimizer", "sgd", "--rank", "1", "--seeds", "1"]
    result = _run(*options, "--steps", "8", "--json", str(save), "--plot", str(plots))
    assert result.exit_code == 0, result.output
    outcomes = convergence.from_json(json.loads(save.read_text()))
    kinds = [outcome.run.kind for outcome in outcomes]
    assert kinds == [PLAIN, BOTH, COLD, NO_FEEDBACK, NEITHER]
    curves = {outcome.run.kind: outcome.curve for outcome in outcomes}

    rates = [1.0, *(0.5 * (1 + math.cos(math.pi * i / 7)) for i in range(7))]
    expected = _train_alone(8, rates)
    assert [point.loss for point in curves[PLAIN][1:]] == pytest.approx(expected, rel=1e-4)
    assert [point.step for point in curves[PLAIN]] == list(range(9))
    assert [point.sent_bytes for point in curves[PLAIN]] == [NET_BYTES * i for i in range(9)]
    for outcome in outcomes[1:]:
        sent = [point.sent_bytes for point in outcome.curve]
        full = [NET_BYTES * i for i in range(5)]
        assert sent == full + [full[-1] + RANK_1_BYTES * i for i in range(1, 5)]
        assert outcome.step_bytes == pytest.approx(RANK_1_BYTES)
        assert outcome.curve[:5] == curves[PLAIN][:5]  # the same seed, data and learning rate
        assert outcome.curve[8].loss != curves[PLAIN][8].loss
    # The first compressed step has no residual yet and starts from a random Q in any case.
    assert len({curves[kind][5].loss for kind in kinds[1:]}) == 1
    assert len({curves[kind][8].loss for kind in kinds[1:]}) == 4
    assert sorted(path.name for path in plots.iterdir()) == [
        "digits-sgd-ablation.png",
        "digits-sgd-curves.png",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "none"], "no task 'none'; there are digits, text"),
        (["--optimizer", "lamb"], "no optimizer 'lamb'; there are sgd, adamw"),
        (["--rank", "0"], "0 is not allowed; give 1 to 56"),
        (["--steps", "4"], "--steps"),
        (["--seeds", "0"], "--seeds"),
        (["--load", "no_such_file"], "no_such_file is no file"),
    ],
)
def test_command_refuses_what_it_cannot_do(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_default_is_the_full_cross() -> None:
    runs = convergence.list_runs(list(TASKS), ["sgd", "adamw"], [1, 2, 4, 8], 3, None)
    assert len(runs) == len(set(runs)) == 2 * 2 * (1 + 4 * 4) * 3
    assert {run.steps for run in runs if run.task == "text"} == {TASKS["text"].steps}


def test_text_is_split_for_good_and_without_overlap() -> None:
    train_text, held_out = tasks.load_paragraphs()
    tasks.load_paragraphs.cache_clear()
    assert tasks.load_paragraphs() == (train_text, held_out)
    assert len(train_text) > 500
    assert len(held_out) > 50
    joined = "\n".join(train_text)
    assert not any(text in joined for text in held_out)
    thirds = [text[i : i + 60] for text in held_out for i in (0, len(text) // 2, len(text) - 60)]
    assert not any(third in joined for third in thirds)


def test_characters_are_numbered() -> None:
    assert tasks.encode("\n ~A?").tolist() == [0, 1, 95, 34, 32]
    assert tasks.encode("é\t").tolist() == [32, 32]
    # two of four a, one each of b and c: 1/2 * log 2 + 2 * 1/4 * log 4
    assert tasks.unigram_entropy(tasks.encode("aabc")) == pytest.approx(1.5 * math.log(2))


def test_windows_are_drawn_by_seed_and_step() -> None:
    inputs, targets = TASKS["text"].draw(3, 7)
    assert inputs.shape == targets.shape == (16, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, TASKS["text"].draw(3, 7)[0])
    for other in ((3, 8), (4, 7)):
        assert not torch.equal(inputs, TASKS["text"].draw(*other)[0])
    inputs, targets = TASKS["text"].held_out()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    decoded = "".join(chr(code + 31) if code else "\n" for code in inputs[5].tolist())
    text = "\n".join(tasks.load_paragraphs()[1]).encode("ascii", "replace").decode()
    assert decoded in text


def test_digits_of_an_epoch_are_drawn_once() -> None:
    batches = [TASKS["digits"].draw(0, step)[0] for step in range(21)]
    images = torch.cat(batches).flatten(1)
    assert images.shape == (1344, 64)
    assert len(images.unique(dim=0)) >= 1340  # scikit-learn's digits may hold equal ones
    assert not torch.equal(batches[0], TASKS["digits"].draw(0, 21)[0])


def test_transformer_sees_only_what_came_before() -> None:
    net = tasks.Transformer()
    assert sum(parameter.numel() for parameter in net.parameters()) == 114_528
    inputs = torch.randint(96, (2, 32))
    changed = inputs.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 96
    before, after = net(inputs), net(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", [PLAIN, Kind(2)])
def test_transformer_learns_more_than_frequencies(kind: Kind) -> None:
    outcome = train(Run("text", "adamw", kind, seed=0, steps=40))
    held_out = tasks.encode("\n".join(tasks.load_paragraphs()[1]))
    assert outcome.curve[0].loss > math.log(96)  # untrained: no better than a guess
    assert outcome.final.loss < tasks.unigram_entropy(held_out) - 0.2
    assert outcome.final.accuracy > 0.2
    assert not outcome.has_diverged


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", [PLAIN, BOTH])
def test_diverged_run_is_reported(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = replace(TASKS["digits"], learning_rates={"sgd": 1e6})
    monkeypatch.setitem(TASKS, "digits", fast)
    outcome = train(Run("digits", "sgd", kind, seed=0, steps=24))
    assert outcome.has_diverged
    assert not math.isfinite(outcome.final.loss)
    assert outcome.final.step < 24


def _outcomes(kind: Kind, *losses: float) -> list[Outcome]:
    """Runs of seeds 0, 1, ... that start at a loss of 4 and end at these."""
    step_bytes = 1000 if kind.rank is None else 100

    def accuracy(loss: float) -> float:
        return 1 - loss / 10 if math.isfinite(loss) else 0.1

    return [
        Outcome(
            Run("digits", "sgd", kind, seed, steps=8),
            [Point(0, 0, 4.0, 0.1), Point(4, 4000, 3.0, 0.5), Point(8, 5000, loss, accuracy(loss))],
            1000,
            step_bytes,
        )
        for seed, loss in enumerate(losses)
    ]


def _study() -> Study:
    return Study(
        [
            *_outcomes(PLAIN, 1.0, 1.2, 1.1),
            *_outcomes(BOTH, 1.5, 1.7, 1.6),
            *_outcomes(COLD, 1.6, 1.5, 2.0),
            *_outcomes(NO_FEEDBACK, 2.0, 2.2, 2.25),
            *_outcomes(NEITHER, 2.0, math.nan, 9.0),
        ]
    )


def test_means_and_spreads_leave_out_diverged_runs() -> None:
    plain = _study().summarize(PLAIN)
    assert [plain.loss, plain.loss_spread] == pytest.approx([1.1, 0.1])
    assert [plain.accuracy, plain.accuracy_spread] == pytest.approx([0.89, 0.01])
    assert (plain.runs, plain.diverged, plain.reduction) == (3, 0, 1)
    neither = _study().summarize(NEITHER)  # 9 is more than twice 4
    assert (neither.loss, neither.loss_spread) == (2.0, None)
    assert (neither.runs, neither.diverged, neither.reduction) == (3, 2, 10)


def test_differences_are_taken_seed_by_seed() -> None:
    study = _study()
    feedback = study.compare(NO_FEEDBACK, BOTH)  # -0.5, -0.5, -0.65
    assert [feedback.mean, feedback.spread] == pytest.approx([-0.55, math.sqrt(0.015 / 2)])
    assert feedback.effect is Effect.LOWERS
    warm = study.compare(COLD, BOTH)  # -0.1, +0.2, -0.4
    assert [warm.mean, warm.spread] == pytest.approx([-0.1, 0.3])
    assert warm.effect is Effect.UNCLEAR
    assert study.compare(BOTH, NO_FEEDBACK).effect is Effect.RAISES
    one = Study([*_outcomes(COLD, 2.0), *_outcomes(BOTH, 1.0)]).compare(COLD, BOTH)
    assert (one.mean, one.spread, one.effect) == (-1.0, None, Effect.UNCLEAR)
    worst = Study([*_outcomes(COLD, 2.0), *_outcomes(BOTH, math.inf)]).compare(COLD, BOTH)
    assert (worst.mean, worst.effect, str(worst)) == (None, Effect.RAISES, "0 -> 1 diverged")


def test_sentences_follow_from_the_numbers() -> None:
    assert _study().conclude() == [
        "Error feedback (with warm start) lowers the final loss at rank 1 (-0.550 ± 0.087).",
        "Warm start (with error feedback) makes no clear difference at rank 1 (-0.100 ± 0.300).",
        "Error feedback (without warm start) lowers the final loss at rank 1 "
        "(-0.400; 2 -> 0 diverged).",
        "Warm start (without error feedback) lowers the final loss at rank 1 "
        "(+0.000; 2 -> 0 diverged).",
        "PowerSGD in place of plain all-reduce raises the final loss at rank 1 (+0.500 ± 0.000).",
    ]
    assert Study(_outcomes(PLAIN, 1.0)).conclude() == []


def test_tables_show_all_kinds_and_what_diverged() -> None:
    console = Console(width=200, record=True)
    console.print(make_table(_study()))
    text = [line.split("│") for line in console.export_text().splitlines() if "│" in line]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in text}
    assert rows["plain all-reduce"] == ["1.100 ± 0.100", "89.0 ± 1.0 %", "0 of 3", "1.0", "1.0"]
    neither = rows["rank 1, no error feedback or warm start"]
    assert neither == ["2.000", "80.0 %", "2 of 3", "0.1", "10.0"]
    lost = Study(_outcomes(PLAIN, math.nan, 9.0))
    assert make_markdown([lost]).splitlines()[2].split(" | ")[1] == "diverged |"


def test_markdown_has_a_row_for_each_study() -> None:
    head, rule, row, sent = make_markdown([_study()]).splitlines()
    assert head == (
        "| final loss | plain | rank 1 | rank 1, no error feedback | rank 1, no warm start | "
        "rank 1, neither |"
    )
    assert rule == "| --- | ---: | ---: | ---: | ---: | ---: |"
    assert row == (
        "| digits, convolutional net, SGD with momentum | 1.100 ± 0.100 | 1.600 ± 0.100 | "
        "2.150 ± 0.132 | 1.700 ± 0.265 | 2.000 (2 of 3 diverged) |"
    )
    less = "0.1 kB, 10.0 times less"
    assert sent == (
        "| digits: sent by each process in a step, from step 5 on | 1.0 kB | "
        f"{' | '.join([less] * 4)} |"
    )


def test_saved_outcomes_are_shown_again(tmp_path: Path) -> None:
    outcomes = [outcome for members in _study().of_kind.values() for outcome in members]
    path = tmp_path / "all.json"
    path.write_text(json.dumps(convergence.to_json(outcomes), allow_nan=False))
    loaded = convergence.from_json(json.loads(path.read_text()))
    assert repr([o.curve for o in loaded]) == repr([o.curve for o in outcomes])  # NaN is not NaN
    assert [o.run for o in loaded] == [o.run for o in outcomes]
    result = _run("--load", str(path), "--markdown")
    assert result.output == make_markdown([_study()]) + "\n"


def test_plots_are_drawn_where_runs_diverged(tmp_path: Path) -> None:
    """Whether they are good to look at is for people to say."""
    lost = Study([*_outcomes(PLAIN, math.nan), *(o for k in (BOTH, COLD, NO_FEEDBACK, NEITHER)
                                                 for o in _outcomes(k, math.nan))])  # fmt: skip
    for name, study in (("some", _study()), ("all", lost)):
        draw_curves(study, tmp_path / f"{name}-curves.png")
        draw_ablation(study, tmp_path / f"{name}-ablation.png")
    assert len(list(tmp_path.glob("*.png"))) == 4
