"""What the operators take. To change it, edit a row: an option that is not named there is refused, with a reason."""
