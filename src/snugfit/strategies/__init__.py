"""The ways of training, one each; they share a protocol and never import each other."""
