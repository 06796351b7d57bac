"""A checkpoint tensor together with the rule by which model parallelism cuts it."""

from __future__ import annotations

from dataclasses import dataclass

from refit_transport.layout.layout import LogicalParameter

EMBEDDING = -1
"""Value of ``ModelTensor.layer`` for the input embedding: it lies on the first pipeline stage."""
HEAD = -2
"""Value of ``ModelTensor.layer`` for the final norm and the output head: they lie on the last pipeline stage."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor parallelism cuts a tensor. ``Cut()`` is a tensor that every rank of a tensor-parallel group holds."""

    dim: int | None = None
    """The dimension that is cut; None for a replicated tensor."""
    parts: tuple[int, ...] = ()
    """Sizes of the components along ``dim`` that are cut each for itself (q, k and v in one tensor, bands of a Mamba
    projection); empty for one component."""
    units: int = 0
    """Indivisible pieces along ``dim`` (key-value heads): an engine with more ranks than units replicates them."""
    kv_groups: int = 0
    """q, k and v projections: number of key-value groups. Megatron stores the three fused, group by group."""
    group_rows: tuple[int, int, int] = (0, 0, 0)
    """Rows of one group's queries, key and value."""
    band: int = 0
    """Which of the three this projection is: 0 query, 1 key, 2 value."""
    vocabulary: bool = False
    """Rows are padded to a multiple before they are cut; padding has no home in the checkpoint."""


REPLICATED = Cut()
ROWS = Cut(dim=0)
COLUMNS = Cut(dim=1)
VOCABULARY = Cut(dim=0, vocabulary=True)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor of a checkpoint, where it lies in the model, and how it is cut."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = REPLICATED
    layer: int = HEAD
    """Decoder layer, ``EMBEDDING`` or ``HEAD``."""
    expert: int = -1
    """Number of the routed expert that the tensor belongs to; -1 for any other tensor."""
    dtype: str = "bfloat16"

    @property
    def parameter(self) -> LogicalParameter:
        return LogicalParameter(self.name, self.shape, self.dtype)


def attention_cuts(heads: int, kv_heads: int, query_rows: int, head_dim: int) -> tuple[Cut, Cut, Cut]:
    """Cuts of the query (``query_rows`` in all), key and value projections of a grouped-query attention."""
    rows = (query_rows // kv_heads, head_dim, head_dim)
    query, key, value = (Cut(0, units=heads if band == 0 else kv_heads, kv_groups=kv_heads, group_rows=rows, band=band)
                         for band in range(3))  # fmt: skip
    return query, key, value
