"""The report's page and charts, the model card, the x-ray of the data."""
