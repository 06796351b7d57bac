"""Multi-token-prediction layers learn what an independent implementation learns, and leave under its names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from refit_transport.rl.batch import batch_sums, loss_mask
from refit_transport.rl.policy.logprobs import token_logprobs
from refit_transport.rl.policy.megatron_cpu import on_cpu
from refit_transport.rl.policy.megatron_logprobs import vocabulary_logprobs
from refit_transport.rl.policy.megatron_model import initialize_groups
from tests.megatron.cases import SMALL_LATENT, Case, cut
from tests.megatron.steps import ADAM, LOSS, make_batch, make_worker, stored
from tests.models import VOCABULARY, make_model, read_checkpoint
from tests.trainers.forked_ranks import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install -e '.[megatron]'")

PREFIX = "model.layers.2."
SCALE = 0.5
CASES = {
    "ep2": Case("deepseek_v3", 2, cut(ep=2), SMALL_LATENT),
    "pp2": Case("deepseek_v3", 2, cut(pp=2), SMALL_LATENT),
}


class Reference(nn.Module):
    """A DeepSeek model whose third layer is the prediction layer, as its authors and inference engines write it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.full = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = self.full.config
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.extra = nn.ModuleDict(
            {
                "eh_proj": nn.Linear(2 * width, width, bias=False),
                "enorm": nn.RMSNorm(width, epsilon),
                "hnorm": nn.RMSNorm(width, epsilon),
                "shared_head_norm": nn.RMSNorm(width, epsilon),
            }
        )
        for parameter in self.extra.parameters():
            nn.init.normal_(parameter, 0.5, 0.2)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [b, s, v] of the model, and those of the prediction layer, which see one token further."""
        model = self.full.model
        states = model.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        options = dict(
            position_embeddings=model.rotary_emb(states, positions),
            position_ids=positions,
            attention_mask=torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)[None, None],
        )
        for layer in model.layers[:2]:
            states = layer(states, **options)
        states = model.norm(states)
        following = model.embed_tokens(ids.roll(-1, 1)).detach()
        joined = torch.cat([self.extra["enorm"](following), self.extra["hnorm"](states.detach())], -1)
        ahead = self.extra["shared_head_norm"](model.layers[2](self.extra["eh_proj"](joined), **options))
        return self.full.lm_head(states), ahead @ self.full.lm_head.weight.detach().T

    def tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """By checkpoint name."""
        self.full.save_pretrained(folder)
        names = ((f"{PREFIX}{name.replace('shared_head_norm', 'shared_head.norm')}", t) for name, t in
                 self.extra.state_dict().items())  # fmt: skip
        return read_checkpoint(folder) | dict(names)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint with a prediction layer, and what one step of the reference makes of it."""
    folder = tmp_path_factory.mktemp("prediction")
    path = make_model("deepseek_v3", folder / "model", seed=1, dtype="float32", num_hidden_layers=3, **SMALL_LATENT)
    reference = Reference(path)
    save_file({n: t.contiguous() for n, t in reference.tensors(folder / "start").items()}, path / "model.safetensors")
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": 2}))

    batch, ids = make_batch(), make_batch()["input_ids"]
    logits, ahead = reference(ids)
    loss, _ = LOSS(token_logprobs(logits, ids), batch, batch_sums(batch))
    found = ahead[:, :-2].log_softmax(-1).gather(2, ids[:, 2:, None])[..., 0]
    prediction = -(found * loss_mask(batch)[:, 2:]).sum() / batch_sums(batch)["tokens"]
    optimizer = torch.optim.AdamW(reference.parameters(), lr=ADAM["lr"], eps=ADAM["adam_eps"], weight_decay=0.0)
    (loss + SCALE * prediction).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    optimizer.step()
    numbers = {"loss": float(loss.detach()), "mtp_loss": float(prediction.detach()), "grad_norm": float(norm)}
    return path, numbers, reference.tensors(folder / "stepped")


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_prediction_layers_is_that_of_an_independent_implementation(trained, name):
    path, numbers, stepped = trained
    case = CASES[name]
    settings = {**case.cut, "mtp_num_layers": 1, "mtp_loss_scaling_factor": SCALE, "optimizer": ADAM}

    def rank_body(rank):
        worker = make_worker(rank, case, path, megatron_cfg=settings)
        loaded = stored(worker)
        return loaded, worker.train(make_batch(), LOSS), stored(worker)

    start = read_checkpoint(path)
    results = run_ranks(case.ranks, rank_body)
    for loaded, metrics, held in results:
        assert {key: metrics[key] for key in numbers} == pytest.approx(numbers, rel=1e-4)
        for name, _, region, value in loaded:
            assert torch.equal(value, start[name][region.slices()]), name
        for name, _, region, value in held:
            torch.testing.assert_close(
                value, stepped[name][region.slices()], atol=2e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    predicted = {name for _, _, held in results for name, *_ in held if name.startswith(PREFIX)}
    assert predicted == {name for name in start if name.startswith(PREFIX)}
    assert all(not torch.equal(start[name], stepped[name]) for name in predicted if "norm" in name or "eh_proj" in name)


def test_rows_too_short_to_predict_take_part_in_the_backward_pass():
    def rank_body(rank):
        with on_cpu():
            initialize_groups(cut())
            logits = torch.zeros(2, 1, VOCABULARY, requires_grad=True)
            return [
                vocabulary_logprobs(logits[:, :width], torch.zeros(2, width, dtype=torch.long), VOCABULARY, 1.0, None)
                for width in (0, 1)
            ]

    ((nothing, one),) = run_ranks(1, lambda rank: [(r.requires_grad, r.detach()) for r in rank_body(rank)])
    assert nothing[0] and one[0]
    assert not nothing[1].any() and one[1].tolist() == [[0.0], [0.0]]
