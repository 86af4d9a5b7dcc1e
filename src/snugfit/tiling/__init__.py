"""Convolutional networks whose maps are cut into tiles, over several devices or over time on one."""
