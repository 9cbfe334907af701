"""The only place that calls torch.distributed for data. Functions take process groups, never a mesh."""
