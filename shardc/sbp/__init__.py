"""The algebra: placements, signatures, rules of operations, boxing and what it costs. Knows no pass and no device."""
