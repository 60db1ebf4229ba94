"""The texts of errors for programs that no plan, or no allowed one, was found for."""
