"""The search: every trial launches a server with one tree setting; the results folder is the truth (DESIGN sections 4.4, 6)."""
