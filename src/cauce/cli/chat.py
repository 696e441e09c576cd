"""`cauce chat`: talk to what a run made, or to any model folder, with the run's own prompt format.

Every line is a conversation of its own, as in training: the policy was taught to answer one prompt. Answers
are greedy. The native engine runs in this process; no Ray is started.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from cauce.errors import DataError, RecipeError
from cauce.types import GenerationRequest, Row, Sampling

if TYPE_CHECKING:
    from cauce.recipe import Recipe


def chat(
    run_or_model: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_MODEL", help="A run, a model folder or a pulled name.", show_default=False),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(help="Answer this once; without it, ask until end of input.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest answer; the run's own unless given.")
    ] = None,
) -> None:
    """Ask a trained policy, or any model folder, a question."""
    folder, recipe = find_policy(run_or_model)
    answer = load_policy(folder, recipe, max_tokens)
    if prompt is not None:
        typer.echo(answer(prompt))
        return
    typer.echo(f"{folder}: every line is answered on its own; Ctrl-D ends", err=True)
    while (line := _ask()) is not None:
        if line.strip():
            started = time.perf_counter()
            typer.echo(answer(line))
            typer.secho(f"({time.perf_counter() - started:.1f} s)", dim=True, err=True)


def find_policy(name: str) -> "tuple[Path, Recipe]":
    """Return the model folder meant by a run, a folder or a name, and the recipe whose prompt format applies.

    A run that has not ended yet answers with its newest checkpoint.
    """
    from cauce.recipe import Recipe, load_resolved

    run = Path(name)
    if not (run / "recipe.toml").is_file():
        from cauce.models.load import local_folder

        return local_folder(name), Recipe()
    recipe = load_resolved(run)
    from cauce import checkpoint

    for folder in [run / "model", *reversed(checkpoint.complete(run).values())]:
        if (folder / "config.json").is_file():
            return folder, recipe
    raise RecipeError(f"{name} has neither a final model nor a checkpoint yet: it has not trained long enough")


def load_policy(folder: Path, recipe: "Recipe", max_tokens: int | None) -> Callable[[str], str]:
    """Load a model folder into the native engine, and return the function that answers a prompt greedily."""
    from cauce.engine.native import NativeEngine
    from cauce.environments.single_turn import SingleTurn
    from cauce.models.load import load_model, resolve_dtype

    loaded = load_model(str(folder), dtype=resolve_dtype(recipe.engine.dtype), attention="sdpa")
    engine = NativeEngine(loaded, slots=1)
    environment = SingleTurn(loaded.tokenizer, recipe.data)
    stops = environment.stop_token_ids(recipe.rollout.stop, eos_token_ids=loaded.eos_token_ids)
    sampling = Sampling(
        max_tokens=max_tokens or recipe.eval.max_tokens or recipe.rollout.max_tokens,
        temperature=0.0,
        stop_token_ids=stops,
        seed=recipe.run.seed,
    )

    def answer(prompt: str) -> str:
        rendered = environment.render(Row(id="chat:0", prompt=prompt, columns={}))
        request = GenerationRequest(
            task=0,
            attempt=1,
            indices=(0,),
            prompt_ids=np.asarray(rendered.token_ids, dtype=np.int32),
            sampling=sampling,
        )
        (completion,) = engine.generate([request])
        if completion.finish_reason == "aborted":
            raise DataError(f"a prompt of {len(request.prompt_ids)} tokens leaves no room for an answer: shorten it")
        return environment.answer_text(completion.token_ids, stops)

    return answer


def _ask() -> str | None:
    """Read one line; None at the end of input or after Ctrl-C."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        typer.echo("", err=True)
        return None
