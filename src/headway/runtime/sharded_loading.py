"""Reads a rank's share of the weights, where transformers can cut while it reads.

transformers reads from a file just the part of a weight that its plan gives to this rank. So a model that does not fit
into one machine's memory as often as there are ranks can still be loaded on all of them. What it reads so is wrapped
for training and hooked; both are taken off again, because Headway follows the plan itself
(`headway.runtime.tensor_parallel`). Embeddings, the output head and recurrent mixers are read whole by every rank, and
the mixers are cut afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

__all__ = ["read_share"]


def read_share(
    kind: Any, path: str, config: Any, dtype: torch.dtype, ranks: int, rules: Mapping[str, str]
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Read a rank's share of a model; all ranks of the process group call this together.

    Args:
        kind: The model's class.
        path: The model, as for transformers.
        config: Its config.
        dtype: Type of the weights.
        ranks: How many ranks share it: all of the default process group.
        rules: What to do otherwise than the model's plan says, by the plan's rules.

    Returns:
        The model, in host memory, and the names of the parameters that are this rank's share; the others are whole.
    """
    mesh = init_device_mesh("cpu", (1, 1, 1, ranks), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    experts = init_device_mesh("cpu", (1, 1, ranks, 1), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))

    class Reader(kind):  # type: ignore[misc]
        """The model's class on the ranks that are there. Its own way to find them is for programs of torchrun."""

        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
            return distributed_config, device_map, TransformersDeviceMesh(mesh, experts)

    distributed = DistributedConfig(tp_size=ranks, tp_plan=dict(rules))
    model: Any = Reader.from_pretrained(path, config=config, dtype=dtype, distributed_config=distributed)
    model.__class__ = kind
    return model, frozenset(_unwrapped(model))


def _unwrapped(model: PreTrainedModel) -> list[str]:
    """Take off what transformers put around weights and forwards; returns the names of what is a share."""
    shares = []
    for path, module in model.named_modules():
        vars(module).pop("forward", None)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if not all(isinstance(placed, Replicate) for placed in parameter.placements):
                    shares.append(f"{path}.{name}" if path else name)
                module.register_parameter(name, nn.Parameter(parameter.to_local(), requires_grad=False))
    return shares
