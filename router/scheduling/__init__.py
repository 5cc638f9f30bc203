"""Pure scheduling decisions: policies, placement, SLO check, circuit breakers, prefix index. No I/O, no clocks."""
