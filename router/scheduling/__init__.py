"""Pure scheduling decisions: policies, placement, SLO check, circuit breakers, prefix index. No I/O, no clocks.

In reading order: policy, slo_admission, prefix_index, breaker, output_faults.
"""
