"""Rep-Net: transfer learning with a frozen, pruned backbone and a small network next to it."""
