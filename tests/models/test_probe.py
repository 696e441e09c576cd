"""The load-time probe: who may share prompts, and that the others still train."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, MambaConfig

from cauce.models import packed_attention
from cauce.models.forward import shares_prompts, token_logps
from cauce.models.probe import choose_packing
from cauce.models.tiled_attention import Tile
from cauce.packing import pack
from tests.learner.cases import plain_model, random_sequences, slow_logps
from tests.tiny import KINDS

SIZE = {"vocab_size": 260, "hidden_size": 32}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
OTHERS = {
    "recurrent": MambaConfig(**SIZE, num_hidden_layers=2, state_size=4),
    "alibi": BloomConfig(**SIZE, n_layer=2, n_head=4),
    "soft-capped": Gemma2Config(**SIZE, **ATTENTION, num_hidden_layers=2, attn_implementation="eager"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoders_share_prompts(tmp_path, kind):
    model = plain_model(tmp_path, kind)
    choice = choose_packing(model)
    assert choice.path == "apart"
    assert choice.difference < 2e-5
    assert shares_prompts(model)


@pytest.mark.parametrize("name", OTHERS)
def test_others_take_plain_rows_and_are_right(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(OTHERS[name], dtype=torch.float32).eval()
    choice = choose_packing(model)
    assert choice.path == "unshared"
    assert "plain rows" in choice.text
    assert not shares_prompts(model)
    sequences = random_sequences(6)
    (packed,) = pack(sequences, 10_000, share_prompts=False)
    logp_M, _ = token_logps(model, packed, 1.0)
    with torch.no_grad():
        expected = torch.cat([slow_logps(model, s) for s in sequences])
    torch.testing.assert_close(logp_M, expected, atol=2e-5, rtol=0)
    logp_M.sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_bf16_model_is_probed_in_float32_and_kept(tmp_path):
    model = plain_model(tmp_path).bfloat16()
    choice = choose_packing(model)
    assert choice.path == "apart"
    assert choice.difference < 2e-5
    assert next(model.parameters()).dtype == torch.bfloat16
    assert model.config._attn_implementation == packed_attention.NAME


def test_a_wrong_attention_is_found_out(tmp_path, monkeypatch):
    # Without its masks an answer would see padding and its neighbours' tokens.
    monkeypatch.setattr(Tile, "sees", lambda tile, window: tile.key_BS[:, None, None, :] >= 0)
    choice = choose_packing(plain_model(tmp_path))
    assert choice.path == "unshared"
    assert choice.difference > 1e-4
