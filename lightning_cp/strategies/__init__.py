"""Strategies: who owns the mesh and when a batch is sharded; shared by Trainer and Fabric."""
