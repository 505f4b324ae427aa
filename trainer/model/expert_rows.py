"""The rows of experts that are all on one rank: sorted and summed there, without Megatron's dispatcher.

Megatron's dispatchers select by masks and split by counts, so that on a device the host waits several times per layer.
A row has exactly k experts here: every size is known beforehand, and nothing has to wait.

Shape legend: T rows, k experts of each, N = T k; E experts; H hidden size.
"""

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


def keep_rows_local(model: torch.nn.Module) -> None:
    """Replaces the dispatcher of every layer whose experts are all on this rank."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.token_dispatcher.ep_size == 1:
            layer.token_dispatcher = _LocalDispatcher(layer.config, get_default_pg_collection())


class _LocalDispatcher(MoETokenDispatcher):
    """Sorts rows by expert, and sums their results in the order of the experts."""

    def dispatch_preprocess(
        self, hidden_T1H: torch.Tensor, routing_map_TE: torch.Tensor, probs_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(Rows by expert, [N, H]; the router's weight of each, [N])."""
        self._shape, self._num_chosen = hidden_T1H.shape, self.config.moe_router_topk
        chosen_Tk = routing_map_TE.float().topk(self._num_chosen, dim=1).indices.sort(dim=1).values
        self._order_N = chosen_Tk.flatten().argsort(stable=True)
        rows_N = self._order_N // self._num_chosen
        weights_N = probs_TE.gather(1, chosen_Tk).flatten().index_select(0, self._order_N)
        self._tokens_per_expert_E = routing_map_TE.sum(dim=0)
        return hidden_T1H.flatten(0, 1).index_select(0, rows_N), weights_N

    def token_dispatch(self, hidden_NH: torch.Tensor, weights_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_NH, weights_N

    def dispatch_postprocess(
        self, hidden_NH: torch.Tensor, weights_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return hidden_NH, self._tokens_per_expert_E, weights_N

    def combine_preprocess(self, out_NH: torch.Tensor) -> torch.Tensor:
        return out_NH

    def token_combine(self, out_NH: torch.Tensor) -> torch.Tensor:
        return out_NH

    def combine_postprocess(self, out_NH: torch.Tensor) -> torch.Tensor:
        by_row_NH = out_NH.index_select(0, self._order_N.argsort())
        out_TH: torch.Tensor = by_row_NH.unflatten(0, (-1, self._num_chosen)).sum(1)
        return out_TH.view(self._shape)
