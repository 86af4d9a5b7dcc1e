"""NeuroFlux: block-wise adaptive local learning."""
