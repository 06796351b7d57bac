"""Trains multi-token-prediction layers beside the policy, without a pull of theirs on the policy's own weights.

Imports Megatron-core, so only what builds a model with such layers imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel


class PredictingModel(GPTModel):
    """While it trains, the last stage gives the logits of the policy and of its n prediction layers, one after another
    along the sequence: [b, (1 + n) * s, vocabulary / tensor-parallel ranks]. Else it gives those of the policy alone.

    Prediction layers learn from the policy's hidden states, embedding and output weights as they are; no gradient of
    theirs goes there, so that the policy learns what its own loss says. Raises ValueError for prediction layers on any
    other stage.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_process != self.post_process:
            raise ValueError(
                "policy.megatron_cfg.pipeline_model_parallel_layout: has prediction layers on a stage before the last, "
                "allowed is the last"
            )

    def _postprocess(
        self,
        *,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        rotary_pos_emb: torch.Tensor | None,
        rotary_pos_cos: torch.Tensor | None,
        rotary_pos_sin: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = [self.output_layer(hidden_states, weight=shared)[0]]
        if self.training and torch.is_grad_enabled():
            held = (self.output_layer.weight if shared is None else shared).detach()
            states = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states.detach(),
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                rotary_pos_cos=rotary_pos_cos,
                rotary_pos_sin=rotary_pos_sin,
                embedding=self._held_embedding,
            )
            predicted = states.chunk(1 + self.config.mtp_num_layers, dim=0)[1:]
            logits += [self.output_layer(state.contiguous(), weight=held)[0] for state in predicted]
        return torch.cat(logits).transpose(0, 1).contiguous()

    def _held_embedding(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.embedding(**inputs).detach()
