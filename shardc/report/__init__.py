"""What people look at: tables and texts made from plans."""
