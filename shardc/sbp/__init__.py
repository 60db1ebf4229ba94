"""The algebra: placements, signatures, rules of operations, boxing and costs. Knows no pass and no device."""
