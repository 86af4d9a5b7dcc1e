"""Network surgery: channels that no longer take part are found, driven to zero and removed."""

from snugfit.surgery.channels import ChannelGroup, Slot, find_groups, width

__all__ = ["ChannelGroup", "Slot", "find_groups", "width"]
