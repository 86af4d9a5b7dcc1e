"""What is shown: console progress, tables, and the run's HTML page. Import the modules themselves; each is light."""
