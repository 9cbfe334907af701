"""Collectives: the one room that calls torch.distributed for data. Functions take groups, never a mesh."""
