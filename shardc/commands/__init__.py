"""The commands of `shardc`, each loaded when it is called. They are thin: what they print, reports and plans make."""
