"""Activations made again in the backward pass: the same numbers, and less of them kept."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from cauce.models import packed_attention
from cauce.models.forward import token_logps
from cauce.models.remaking import can_remake
from cauce.packing import pack
from tests.learner.cases import assert_close, gradients, plain_model, random_sequences
from tests.tiny import KINDS


def run(model, packed):
    """Log-probs and gradients, and the bytes that autograd held between them, each storage once."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logp_M, entropy_M = token_logps(model, packed, 0.9)
    logp_M.square().sum().backward()
    weights = sum(p.nbytes for p in model.parameters())
    return logp_M.detach(), entropy_M, gradients(model), sum(kept.values()) - weights


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_from_less_memory(tmp_path, kind, share):
    model = plain_model(tmp_path, kind, layers=6)
    assert can_remake(model)
    if share:
        model.set_attn_implementation(packed_attention.NAME)
    sequences = random_sequences(1, groups=1, answers=12, longest=40, masked=True)
    (kept,) = pack(sequences, 10_000, share_prompts=share)
    remade = pack(sequences, kept.num_tokens // 4 if share else 1, share_prompts=share)
    assert all(packed.is_remade for packed in remade)
    if not share:
        (kept, *_), (remade, *_) = pack(sequences[:1], 10_000, share_prompts=False), remade
    else:
        (remade,) = remade
    logp_M, entropy_M, expected, bytes_kept = run(model, kept)
    again_M, entropy_again_M, found, bytes_remade = run(model, remade)
    torch.testing.assert_close(again_M, logp_M, atol=0, rtol=0)
    torch.testing.assert_close(entropy_again_M, entropy_M, atol=0, rtol=0)
    assert_close(found, expected, 1e-6)
    assert bytes_remade < bytes_kept / 3
    assert all("forward" not in vars(module) for module in model.modules())


def test_without_gradients_nothing_is_made_again(tmp_path, monkeypatch):
    model = plain_model(tmp_path)
    (packed,) = pack(random_sequences(2, groups=1, answers=1), 1, share_prompts=False)
    monkeypatch.setattr("cauce.models.remaking.checkpoint", None)
    with torch.no_grad():
        token_logps(model, packed, 1.0)
    with pytest.raises(TypeError):
        token_logps(model, packed, 1.0)


def test_a_model_without_marked_layers_says_so():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, state_size=4)
    assert can_remake(AutoModelForCausalLM.from_config(config))
    assert not can_remake(torch.nn.Sequential(torch.nn.Linear(3, 3)))
