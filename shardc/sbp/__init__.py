"""The algebra: placements, signatures, the rules of operations, boxing and what it costs. Knows no pass and no device."""
