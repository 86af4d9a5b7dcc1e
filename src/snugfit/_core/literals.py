"""Names of choices that options and toolboxes share."""

from typing import Literal

CacheDtype = Literal["float32", "float16", "bfloat16", "uint8"]
"""Stored type of cached activations."""
ImportanceMetric = Literal["contribution", "weight", "gradient"]
"""``contribution`` is ElasticTrainer's own; it compares with the others in its Figure 20."""
WeightUpdate = Literal["all-reduce", "gateway"]
"""Where the weights of tiled layers are updated."""
TileSizes = Literal["equal", "speed"]
Rest = Literal["gateway", "replicated"]
"""Where the layers behind the tiled ones are computed: by rank 0, or by every process."""
