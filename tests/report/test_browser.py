"""The report in a real browser: it draws, stays within itself, and shows what it holds."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from cauce.report.html import write_report
from tests.report.conftest import Opened, Reader
from tests.report.run_folder import HOSTILE, UNICODE, make_run

PLOTS = """() => [...document.querySelectorAll(".plot")].map(
    (place) => [place.id, place.querySelectorAll(".trace, .barlayer .point").length])"""


def test_report_draws_every_figure_without_a_complaint_or_the_network(desktop: Opened, report: Path) -> None:
    drawn = dict(desktop.page.evaluate(PLOTS))
    assert {"plot-learning", "plot-loss-policy", "plot-policy-entropy", "plot-optim-grad_norm", "plot-time",
            "plot-sampler-log_ratio_abs_mean", "plot-rewards"} <= drawn.keys()  # fmt: skip
    assert all(count > 0 for count in drawn.values()), drawn
    assert desktop.page.locator("#plot-learning .errorbar").count() == 3  # plans 0, 10 and 12
    assert desktop.troubles == []
    assert desktop.requests == [report.as_uri()]


def test_text_of_a_model_cannot_break_out(desktop: Opened) -> None:
    samples = desktop.page.locator("#sample-viewer")
    samples.get_by_text("Next").click()
    samples.get_by_text("Next").click()
    assert samples.locator(".answer").text_content() == HOSTILE + "<|im_end|>"
    pairs = desktop.page.locator("#pair-viewer")
    pairs.get_by_text("Next").click()
    assert pairs.locator(".pair .text").first.text_content() == HOSTILE
    assert desktop.page.evaluate("window.broken") is None
    assert desktop.page.locator("img").count() == 0


def test_each_token_tells_its_probability_by_hover_tap_and_colour(desktop: Opened) -> None:
    samples = desktop.page.locator("#sample-viewer")
    tokens = samples.locator(".token")
    assert tokens.count() == len("The answer is 2.") + 1
    assert tokens.first.get_attribute("title") == "p = 99.0 %, log p = -0.010, token 1 of 17"
    assert tokens.last.get_attribute("title") == "p = 5.00 %, log p = -2.996, token 17 of 17"
    alphas = [
        float(re.findall(r"[\d.]+", token.evaluate("t => getComputedStyle(t).backgroundColor"))[3])
        for token in (tokens.nth(0), tokens.nth(16))
    ]
    assert alphas == pytest.approx([0.0075, 0.7125], abs=0.005)
    tokens.last.click()
    assert samples.locator(".readout").text_content() == ('"<|im_end|>": p = 5.00 %, log p = -2.996, token 17 of 17')


def test_characters_of_several_tokens_are_whole(desktop: Opened) -> None:
    samples = desktop.page.locator("#sample-viewer")
    samples.get_by_text("Next").click()
    text = samples.locator(".answer").text_content() or ""
    assert text.replace("\u21b5", "") == UNICODE + "<|im_end|>"
    # One token of two bytes' character and three of the emoji add nothing of their own.
    assert samples.locator(".token.part").count() == 4


def test_samples_are_filtered_by_plan_and_reward(desktop: Opened) -> None:
    samples = desktop.page.locator("#sample-viewer")
    plan, reward = samples.locator("select").all()
    assert samples.locator(".count").text_content() == "1 of 96"
    plan.select_option("12")
    assert samples.locator(".count").text_content() == "1 of 8"
    reward.select_option(label="reward 1")
    assert samples.locator(".count").text_content() == "1 of 2"
    assert (samples.locator(".facts").text_content() or "").startswith("plan 12, task 22, answer 1, reward 1,")
    reward.select_option(label="no reward")
    assert "reward none (failed)" in (samples.locator(".facts").text_content() or "")
    pairs = desktop.page.locator("#pair-viewer")
    pairs.locator("select").select_option("better")
    assert pairs.locator(".count").text_content() == "1 of 12"


def test_phone_has_no_horizontal_scroll(reader: Reader, report: Path) -> None:
    opened = reader.open(report, is_phone=True, is_dark=True)
    opened.page.wait_for_selector("#plot-rewards .point")
    opened.page.locator("#sample-viewer").get_by_text("Next").click()
    opened.page.locator("details summary").click()
    opened.page.evaluate("window.scrollTo(1000, 0)")
    assert opened.page.evaluate("[document.documentElement.scrollWidth, window.scrollX]") == [390, 0]
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"
    assert opened.troubles == []


def test_a_change_of_theme_draws_the_figures_again(desktop: Opened) -> None:
    line = desktop.page.locator("#plot-learning .js-line").first
    expect(line).to_have_css("stroke", "rgb(47, 111, 208)")
    desktop.page.emulate_media(color_scheme="dark")
    expect(line).to_have_css("stroke", "rgb(106, 162, 245)")
    desktop.page.emulate_media(color_scheme="light")
    expect(line).to_have_css("stroke", "rgb(47, 111, 208)")
    assert desktop.troubles == []


@pytest.mark.parametrize("num_plans", [0, 1])
def test_runs_that_hardly_began_have_a_report_too(reader: Reader, tmp_path: Path, num_plans: int) -> None:
    run_dir = make_run(tmp_path / "early", num_plans=num_plans, evaluates=False, ends=False)
    opened = reader.open(write_report(run_dir))
    if num_plans:
        opened.page.wait_for_selector("#plot-rewards .point")
        assert opened.page.locator("#sample-viewer .token").count() > 0
    else:
        assert opened.page.get_by_text("No plan has been applied yet.").count() == 1
        assert opened.page.locator("#sample-viewer").count() == 0
    assert opened.page.get_by_text("No evaluation").count() == 1
    assert opened.troubles == []
