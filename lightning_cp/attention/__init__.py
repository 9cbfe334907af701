"""The algorithms: a mesh, a layout and a kernel become one differentiable attention call."""
