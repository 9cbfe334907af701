"""PyTorch's table of what its compiler does with each function: made once, on import, for all ranks."""

from torch._dynamo import trace_rules

trace_rules.get_torch_obj_rule_map()
