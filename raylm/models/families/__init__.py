"""One file a family: how its configuration is read and its tensors are named. The list is in raylm.models.registry."""
