"""Context-parallel attention: one differentiable call from a mesh, a layout and a kernel."""
