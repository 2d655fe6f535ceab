"""What the other modules share, under the names by which some scripts import it."""
